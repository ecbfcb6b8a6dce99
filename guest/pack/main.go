// Command pack puts together what doz runs from: it unpacks the kernels, builds
// deckhold into an initramfs, and writes the manifest, all beside the executable.
// It needs nothing but Go, and run in the project's folder.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"

	"dozable.com/doz/internal/initrd"
	"dozable.com/doz/internal/parts"
)

func main() {
	arch := flag.String("arch", "x86_64", "x86_64 or arm64")
	out := flag.String("out", "libexec/doz", "folder to fill")
	version := flag.String("version", "dev", "doz's version")
	public := flag.Bool("public", false, "leave out what public releases do not carry")
	flag.Parse()
	if err := pack(*arch, *out, *version, *public); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

// goArch is Go's name for each architecture doz is built for.
var goArch = map[string]string{"x86_64": "amd64", "arm64": "arm64"}

// packer fills one folder.
type packer struct {
	out, arch, version string
	wrote              map[string]bool // below out
}

func pack(arch, out, version string, public bool) error {
	if goArch[arch] == "" {
		return fmt.Errorf("%q is no architecture doz is built for: x86_64 or arm64", arch)
	}
	p := &packer{out: out, arch: arch, version: version, wrote: map[string]bool{}}
	m := parts.Manifest{Schema: parts.Schema, Arch: arch, Version: version, Release: "source"}
	variants := []string{"plain", "sound"}
	if public {
		m.Release, variants = "public", variants[:1]
	}
	for _, variant := range variants {
		kernel, err := p.kernel(variant)
		if err != nil {
			return err
		}
		m.Parts = append(m.Parts, kernel)
	}
	for _, build := range []func() (parts.Part, error){p.initrd, p.tools} {
		part, err := build()
		if err != nil {
			return err
		}
		m.Parts = append(m.Parts, part)
	}
	if err := p.licences(); err != nil {
		return err
	}
	return p.finish(m)
}

// finish writes the manifest, which is what makes the parts count, and removes what
// an earlier run left that is no part any more.
func (p *packer) finish(m parts.Manifest) error {
	manifest, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	for _, file := range []struct{ name, content string }{
		{"VERSION", m.Version + "\n"}, {"RELEASE", m.Release + "\n"}, {parts.ManifestFile, string(manifest) + "\n"},
	} {
		if err := p.write(file.name, []byte(file.content)); err != nil {
			return err
		}
	}
	for _, folder := range []string{"kernels", "guest", "licences"} {
		err := filepath.WalkDir(filepath.Join(p.out, folder), func(path string, d fs.DirEntry, err error) error {
			if name, _ := filepath.Rel(p.out, path); err == nil && !d.IsDir() && !p.wrote[name] {
				return os.Remove(path)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// kernelFile is a kernel's name for an architecture and variant.
func kernelFile(arch, variant string) string {
	if arch == "arm64" {
		return "image-arm64-" + variant
	}
	return "vmlinux-" + arch + "-" + variant
}

// kernel unpacks a variant of the kernel, and takes only the recorded one.
func (p *packer) kernel(variant string) (parts.Part, error) {
	sums, err := readSums("guest/kernel/SHA256SUMS")
	if err != nil {
		return parts.Part{}, err
	}
	file := kernelFile(p.arch, variant)
	packed, err := os.ReadFile("guest/kernel/" + file + ".zst")
	if err != nil {
		return parts.Part{}, err
	}
	d, err := zstd.NewReader(nil)
	if err != nil {
		return parts.Part{}, err
	}
	defer d.Close()
	kernel, err := d.DecodeAll(packed, nil)
	if err != nil {
		return parts.Part{}, fmt.Errorf("%s.zst: %w", file, err)
	}
	if sum := sha256.Sum256(kernel); hex.EncodeToString(sum[:]) != sums[file] {
		return parts.Part{}, fmt.Errorf("%s.zst is not the kernel of guest/kernel/SHA256SUMS", file)
	}
	return p.part("kernel-"+variant, "kernels", file, "", kernel)
}

// initrd builds the guest's programs and packs them.
func (p *packer) initrd() (parts.Part, error) {
	tmp, err := os.MkdirTemp("", "doz-pack-")
	if err != nil {
		return parts.Part{}, err
	}
	defer os.RemoveAll(tmp)
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid= -X main.version="+p.version, "-o", tmp+"/deckhold", "./cmd/deckhold")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+goArch[p.arch])
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return parts.Part{}, fmt.Errorf("cannot build deckhold: %w", err)
	}
	deckhold, err := os.ReadFile(tmp + "/deckhold")
	if err != nil {
		return parts.Part{}, err
	}
	var archive bytes.Buffer
	if err := initrd.Write(&archive, map[string][]byte{"deckhold": deckhold}); err != nil {
		return parts.Part{}, err
	}
	return p.part(parts.Initrd, "guest", "initrd", ".cpio", archive.Bytes())
}

// tools takes the tools layer, and only the recorded one.
func (p *packer) tools() (parts.Part, error) {
	sums, err := readSums("guest/tools/SHA256SUMS")
	if err != nil {
		return parts.Part{}, err
	}
	file := "tools-" + p.arch + ".squashfs"
	layer, err := os.ReadFile("guest/tools/" + file)
	if err != nil {
		return parts.Part{}, err
	}
	if sum := sha256.Sum256(layer); hex.EncodeToString(sum[:]) != sums[file] {
		return parts.Part{}, fmt.Errorf("%s is not the layer of guest/tools/SHA256SUMS", file)
	}
	return p.part(parts.Tools, "guest", "tools", ".squashfs", layer)
}

// part writes a part, and names it so that its sum shows.
func (p *packer) part(role, folder, base, ext string, data []byte) (parts.Part, error) {
	sum := sha256.Sum256(data)
	part := parts.Part{Role: role, File: folder + "/" + base + ext, SHA256: hex.EncodeToString(sum[:]), Size: int64(len(data))}
	part.Name = base + "-" + part.SHA256[:12] + ext
	return part, p.write(part.File, data)
}

// write puts a file in place whole, and leaves one alone that is the same already.
func (p *packer) write(name string, data []byte) error {
	p.wrote[filepath.FromSlash(name)] = true
	path := filepath.Join(p.out, name)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", data, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// readSums reads a file of sha256sum's.
func readSums(path string) (map[string]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	sums := map[string]string{}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) == 2 {
			sums[f[1]] = f[0]
		}
	}
	return sums, nil
}

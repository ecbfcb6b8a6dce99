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

func pack(arch, out, version string, public bool) error {
	m := parts.Manifest{Schema: 1, Arch: arch, Version: version, Release: "source"}
	variants := []string{"plain", "sound"}
	if public {
		m.Release, variants = "public", variants[:1]
	}
	sums, err := readSums("guest/kernel/SHA256SUMS")
	if err != nil {
		return err
	}
	for _, variant := range variants {
		p, err := packKernel(out, arch, variant, sums)
		if err != nil {
			return err
		}
		m.Parts = append(m.Parts, p)
	}
	p, err := packInitrd(out, arch, version)
	if err != nil {
		return err
	}
	m.Parts = append(m.Parts, p)
	tools, err := os.ReadFile("guest/tools/tools-" + arch + ".squashfs")
	if err != nil {
		return err
	}
	if p, err = put(out, parts.Tools, "guest", "tools", ".squashfs", tools); err != nil {
		return err
	}
	m.Parts = append(m.Parts, p)
	manifest, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	for name, data := range map[string][]byte{
		parts.ManifestFile: append(manifest, '\n'), "VERSION": []byte(version + "\n"), "RELEASE": []byte(m.Release + "\n"),
	} {
		if err := replace(filepath.Join(out, name), data); err != nil {
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

func packKernel(out, arch, variant string, sums map[string]string) (parts.Part, error) {
	file := kernelFile(arch, variant)
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
	p, err := put(out, "kernel-"+variant, "kernels", file, "", kernel)
	if err == nil && p.SHA256 != sums[file] {
		err = fmt.Errorf("%s.zst is not the kernel of guest/kernel/SHA256SUMS", file)
	}
	return p, err
}

// packInitrd builds the guest's programs and packs them.
func packInitrd(out, arch, version string) (parts.Part, error) {
	goarch := map[string]string{"x86_64": "amd64", "arm64": "arm64"}[arch]
	tmp, err := os.MkdirTemp("", "doz-pack-")
	if err != nil {
		return parts.Part{}, err
	}
	defer os.RemoveAll(tmp)
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid= -X main.version="+version, "-o", tmp+"/deckhold", "./cmd/deckhold")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+goarch)
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
	return put(out, parts.Initrd, "guest", "initrd", ".cpio", archive.Bytes())
}

// put writes a part under a name that carries its sum.
func put(out, role, folder, base, ext string, data []byte) (parts.Part, error) {
	sum := sha256.Sum256(data)
	p := parts.Part{Role: role, File: folder + "/" + base + ext, SHA256: hex.EncodeToString(sum[:]), Size: int64(len(data))}
	p.Name = base + "-" + p.SHA256[:12] + ext
	return p, replace(filepath.Join(out, p.File), data)
}

// replace puts a file in place whole, and leaves one alone that is the same already.
func replace(path string, data []byte) error {
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

//go:build linux

package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"dozable.com/doz/internal/vm"
)

// probed is what the engine knows of this computer, as it is remembered.
type probed struct {
	// Key is what it holds for: this boot of the computer, this QEMU, and /dev/kvm as
	// this user sees it.
	Key      string      `json:"key"`
	Binary   string      `json:"binary"`
	TSCKHz   int64       `json:"tscKHz"`
	Features vm.Features `json:"features"`
}

const (
	probeDeadline = 2 * time.Second
	// kvmDeadline is how long an ordinary kernel may take under KVM to run out of
	// things to do. On hardware it takes a third of a second.
	kvmDeadline = 1300 * time.Millisecond
)

// Probe implements vm.Engine.
func (e *Engine) Probe(ctx context.Context) (vm.Features, error) {
	p, err := e.probe(ctx)
	if err != nil {
		return vm.Features{}, err
	}
	return p.Features, nil
}

func (e *Engine) probe(ctx context.Context) (*probed, error) {
	e.probing.Lock()
	defer e.probing.Unlock()
	binary, key, err := e.identify()
	if err != nil {
		return nil, err
	}
	if e.probed != nil && e.probed.Key == key {
		return e.probed, nil
	}
	if p := e.recall(key); p != nil {
		e.probed = p
		return p, nil
	}
	ctx, cancel := context.WithTimeout(ctx, probeDeadline)
	defer cancel()
	p := &probed{Key: key, Binary: binary, TSCKHz: tscKHz()}
	if p.Features, err = e.look(ctx, binary); err != nil {
		return nil, err
	}
	e.remember(p)
	e.probed = p
	return p, nil
}

func (e *Engine) memory() string { return filepath.Join(e.options.StateDir, "qemu.json") }

// recall gives an earlier answer, nil when there is none that holds.
func (e *Engine) recall(key string) *probed {
	if e.options.StateDir == "" {
		return nil
	}
	data, err := os.ReadFile(e.memory())
	var p probed
	if err != nil || json.Unmarshal(data, &p) != nil || p.Key != key || p.Features.Engine == "" {
		return nil
	}
	return &p
}

// remember is worth trying and not worth failing for: without it the next process
// looks again.
func (e *Engine) remember(p *probed) {
	data, err := json.Marshal(p)
	if err != nil || e.options.StateDir == "" {
		return
	}
	tmp, err := os.CreateTemp(e.options.StateDir, "qemu-*.json")
	if err != nil {
		return
	}
	_, err = tmp.Write(data)
	if closeErr := tmp.Close(); err == nil && closeErr == nil {
		err = os.Rename(tmp.Name(), e.memory())
	}
	if err != nil {
		os.Remove(tmp.Name())
	}
}

// arch is this computer's, as the kernels are named.
func arch() string {
	if runtime.GOARCH == "arm64" {
		return "arm64"
	}
	return "x86_64"
}

var errNoBinary = errors.New("QEMU is not installed")

// identify finds QEMU and what an earlier answer would hold for.
func (e *Engine) identify() (binary, key string, err error) {
	binary = e.options.Binary
	if binary == "" {
		name, pkg := "qemu-system-x86_64", "qemu-system-x86"
		if arch() == "arm64" {
			name, pkg = "qemu-system-aarch64", "qemu-system-arm"
		}
		if binary, err = exec.LookPath(name); err != nil {
			return "", "", fmt.Errorf("%w: there is no %s on the PATH (on Debian: apt install %s)", errNoBinary, name, pkg)
		}
	}
	info, err := os.Stat(binary)
	if err != nil {
		return "", "", fmt.Errorf("%w: %w", errNoBinary, err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", "", err
	}
	kvm := "none"
	if k, err := os.Stat("/dev/kvm"); err == nil {
		kvm = fmt.Sprint(k.Mode())
	}
	groups, _ := os.Getgroups()
	return binary, fmt.Sprintf("boot %s, %s of %d bytes at %d, kvm %s for %d %v",
		strings.TrimSpace(string(boot)), binary, info.Size(), info.ModTime().UnixNano(), kvm, os.Geteuid(), groups), nil
}

var versionText = regexp.MustCompile(`version (\d+\.\d+)(\.\d+)?`)

// look asks QEMU and the computer.
func (e *Engine) look(ctx context.Context, binary string) (vm.Features, error) {
	out, err := exec.CommandContext(ctx, binary, "--version").Output()
	match := versionText.FindStringSubmatch(string(out))
	if err != nil || match == nil {
		return vm.Features{}, fmt.Errorf("%s does not say which version it is", binary)
	}
	f := vm.Features{Engine: "qemu", Version: match[1] + match[2], Arch: arch()}
	f.MachineType = "virt-" + match[1]
	if f.Arch == "x86_64" {
		f.MachineType = "pc-q35-" + match[1]
		if hasQboot(ctx, binary) {
			f.MachineType += "+" + qboot
		}
	}
	if f.Audio = newer(f.Version, 8, 2); !f.Audio {
		f.AudioWhy = fmt.Sprintf("QEMU %s has no virtio sound device; 8.2 is the first that has", f.Version)
	}
	f.Accelerator, f.AcceleratorWhy = "kvm", "an ordinary kernel runs under KVM"
	why := e.tryKVM(ctx, binary, f)
	if errors.Is(ctx.Err(), context.Canceled) {
		return vm.Features{}, ctx.Err() // it proves nothing
	}
	if why != nil {
		f.Accelerator, f.Emulated = "tcg", true
		f.AcceleratorWhy = why.Error() + ", so the processor is emulated: right, and 5 to 30 times slower"
	}
	return f, nil
}

// hasQboot says whether QEMU finds its qboot firmware.
func hasQboot(ctx context.Context, binary string) bool {
	folders, err := exec.CommandContext(ctx, binary, "-L", "help").Output()
	if err != nil {
		return false
	}
	for _, folder := range strings.Fields(string(folders)) {
		if _, err := os.Stat(filepath.Join(folder, "qboot.rom")); err == nil {
			return true
		}
	}
	return false
}

// tryKVM runs an ordinary kernel under KVM: that the device opens proves nothing. It
// gives why KVM cannot be used, one clause.
func (e *Engine) tryKVM(ctx context.Context, binary string, f vm.Features) error {
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return errors.New("this computer has no /dev/kvm")
	case errors.Is(err, os.ErrPermission):
		return errors.New("this user may not open /dev/kvm (join the group kvm)")
	case err != nil:
		return fmt.Errorf("/dev/kvm cannot be opened (%w)", err)
	}
	dev.Close()
	if e.options.Kernel == "" {
		return errors.New("there is no kernel to try /dev/kvm with")
	}
	f.Accelerator, f.Emulated = "kvm", false
	ctx, cancel := context.WithTimeout(ctx, kvmDeadline)
	defer cancel()
	err = tryKernel(ctx, binary, e.options.Kernel, f)
	if errors.Is(err, context.DeadlineExceeded) {
		return errors.New("/dev/kvm opens but does not run an ordinary kernel in time")
	}
	if err != nil {
		return fmt.Errorf("/dev/kvm opens but does not run an ordinary kernel (%w)", err)
	}
	return nil
}

// tryKernel boots a kernel without an initramfs. One that works gets all the way to
// looking for its root, finds none and panics, which ends QEMU. One that fails on the
// way restarts, which ends QEMU too, so the panic's text is looked for.
func tryKernel(ctx context.Context, binary, kernel string, f vm.Features) error {
	args := append(board(f.MachineType, ""), processor(f)...)
	args = append(args, "-m", "256M", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "stdio", "-kernel", kernel, "-append", strings.Join(kernelWords(f, 1, 0), " "))
	cmd := exec.CommandContext(ctx, binary, args...)
	words := &lastWords{}
	cmd.Stderr = words
	console, err := cmd.Output()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("QEMU says: %s", words)
	case !bytes.Contains(console, []byte("Unable to mount root fs")):
		return errors.New("it crashes")
	}
	return nil
}

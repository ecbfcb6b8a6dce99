package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"dozable.com/doz/internal/vm"
)

// probed is what the engine knows of this computer, as it is remembered.
type probed struct {
	// Key is what it holds for: this boot of the computer and this QEMU.
	Key      string      `json:"key"`
	Binary   string      `json:"binary"`
	TSCKHz   int64       `json:"tscKHz"`
	Features vm.Features `json:"features"`
}

// kvmDeadline is how long an ordinary kernel may take under KVM to run out of
// things to do. On hardware it takes a third of a second.
const kvmDeadline = 1500 * time.Millisecond

// Probe implements vm.Engine.
func (e *Engine) Probe(ctx context.Context) (vm.Features, error) {
	p, err := e.probe(ctx)
	if err != nil {
		return vm.Features{}, err
	}
	return p.Features, nil
}

func (e *Engine) probe(ctx context.Context) (*probed, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.probed != nil {
		return e.probed, nil
	}
	binary, key, err := e.identify()
	if err != nil {
		return nil, err
	}
	p := &probed{}
	file := filepath.Join(e.options.StateDir, "qemu.json")
	if data, err := os.ReadFile(file); err == nil && json.Unmarshal(data, p) == nil && p.Key == key && p.Features.Engine != "" {
		e.probed = p
		return p, nil
	}
	p = &probed{Key: key, Binary: binary, TSCKHz: tscKHz()}
	if p.Features, err = e.look(ctx, binary); err != nil {
		return nil, err
	}
	if data, err := json.Marshal(p); err == nil && e.options.StateDir != "" {
		// Worth remembering, not worth failing for.
		if tmp := file + ".new"; os.WriteFile(tmp, data, 0o600) == nil {
			os.Rename(tmp, file)
		}
	}
	e.probed = p
	return p, nil
}

// identify finds QEMU and what an earlier answer would hold for.
func (e *Engine) identify() (binary, key string, err error) {
	binary = e.options.Binary
	if binary == "" {
		name := map[string]string{"x86_64": "qemu-system-x86_64", "arm64": "qemu-system-aarch64"}[arch()]
		if binary, err = exec.LookPath(name); err != nil {
			return "", "", fmt.Errorf("%w: there is no %s on the PATH (on Debian: apt install qemu-system-x86)", errNoBinary, name)
		}
	}
	info, err := os.Stat(binary)
	if err != nil {
		return "", "", fmt.Errorf("%w: %v", errNoBinary, err)
	}
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	kvm := "no kvm"
	if k, err := os.Stat("/dev/kvm"); err == nil {
		kvm = fmt.Sprint(k.Mode(), k.ModTime().Unix())
	}
	return binary, fmt.Sprint(strings.TrimSpace(string(boot)), " ", binary, " ", info.Size(), " ", info.ModTime().Unix(), " ", kvm, " ", os.Geteuid()), nil
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
	f.MachineType = map[string]string{"x86_64": "pc-q35-", "arm64": "virt-"}[f.Arch] + match[1]
	if f.Audio = newer(f.Version, 8, 2); !f.Audio {
		f.AudioWhy = fmt.Sprintf("QEMU %s has no virtio sound device; 8.2 is the first that has", f.Version)
	}
	f.Accelerator, f.AcceleratorWhy = "kvm", "an ordinary kernel runs under KVM"
	if err := e.tryKVM(ctx, binary, f); err != nil {
		f.Accelerator, f.Emulated = "tcg", true
		f.AcceleratorWhy = err.Error() + ", so the processor is emulated: right, and 5 to 30 times slower"
	}
	return f, nil
}

// tryKVM boots doz's own kernel under KVM. Without an initramfs it finds no root and
// panics, which ends QEMU; that a device opens proves nothing.
func (e *Engine) tryKVM(ctx context.Context, binary string, f vm.Features) error {
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return errors.New("this computer has no /dev/kvm")
	case errors.Is(err, os.ErrPermission):
		return errors.New("this user may not open /dev/kvm (join the group kvm)")
	case err != nil:
		return fmt.Errorf("/dev/kvm cannot be opened (%v)", err)
	}
	dev.Close()
	if e.options.Kernel == "" {
		return errors.New("there is no kernel to try /dev/kvm with")
	}
	ctx, cancel := context.WithTimeout(ctx, kvmDeadline)
	defer cancel()
	hardware := f
	hardware.Emulated = false
	args := []string{"-machine", f.MachineType, "-accel", "kvm", "-cpu", "host", "-m", "256M", "-nodefaults", "-no-user-config",
		"-display", "none", "-no-reboot", "-kernel", e.options.Kernel, "-append", strings.Join(e.kernelWords(hardware, 0), " ")}
	err = exec.CommandContext(ctx, binary, args...).Run()
	if ctx.Err() != nil {
		return errors.New("/dev/kvm opens but did not run an ordinary kernel within its time")
	}
	if err != nil {
		return errors.New("/dev/kvm opens but QEMU cannot use it")
	}
	return nil
}

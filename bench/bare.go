package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/initrd"
	"dozable.com/doz/internal/parts"
	"dozable.com/doz/internal/vm"
	"dozable.com/doz/internal/vm/qemu"
)

// token is what the bare machines' channel is opened with.
const token = "00112233445566778899aabbccddeeff"

// bareBoots gives how long a bare machine takes, in milliseconds, from the engine's
// Start to the line of an init that only prints, and to deckhold's first answer. The
// two take turns, so that a busy computer slows both.
func bareBoots() (printing, deckhold float64, err error) {
	set, err := parts.Find()
	if err != nil {
		return 0, 0, err
	}
	dir, err := os.MkdirTemp("", "doz-bench-")
	if err != nil {
		return 0, 0, err
	}
	defer os.RemoveAll(dir)
	kernel, _ := set.Current(parts.KernelPlain)
	own, _ := set.Current(parts.Initrd)
	prints, err := printingInit(dir)
	if err != nil {
		return 0, 0, err
	}
	engine := qemu.New(qemu.Options{StateDir: dir, Kernel: set.Path(kernel)})
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if _, err := engine.Probe(ctx); err != nil {
		return 0, 0, err
	}
	config := vm.Config{
		Dir: filepath.Join(dir, "machine"), Name: "bare", CPUs: 2, MemoryMiB: 1024, MemoryFile: filepath.Join(dir, "memory"),
		Kernel: set.Path(kernel), Initrd: set.Path(own), Cmdline: []string{guest.TokenParam + "=" + token},
	}
	if err := os.Mkdir(config.Dir, 0o700); err != nil {
		return 0, 0, err
	}
	printer := config
	printer.Initrd, printer.ConsoleFile, printer.ConsoleLimit = prints, filepath.Join(dir, "console"), 1<<20
	var took [2][]float64
	for range 5 {
		for i, run := range []func() error{
			func() error { return boot(ctx, engine, printer, untilPrinted) },
			func() error { return boot(ctx, engine, config, untilAnswered) },
		} {
			ms, err := median(1, run)
			if err != nil {
				return 0, 0, err
			}
			took[i] = append(took[i], ms)
		}
	}
	slices.Sort(took[0])
	slices.Sort(took[1])
	return took[0][2], took[1][2], nil
}

// printingInit makes an initramfs of the init that only prints.
func printingInit(dir string) (string, error) {
	program, path := filepath.Join(dir, "init"), filepath.Join(dir, "initrd")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./bench/init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cannot build the init that only prints: %w: %s", err, out)
	}
	data, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	var archive bytes.Buffer
	if err := initrd.Write(&archive, map[string][]byte{"deckhold": data}); err != nil {
		return "", err
	}
	return path, os.WriteFile(path, archive.Bytes(), 0o600)
}

// boot starts a machine, waits for it, and ends it.
func boot(ctx context.Context, engine *qemu.Engine, c vm.Config, until func(context.Context, vm.Machine, vm.Config) error) error {
	m, err := engine.Start(ctx, c)
	if err != nil {
		return err
	}
	defer m.Kill()
	return until(ctx, m, c)
}

func untilAnswered(ctx context.Context, m vm.Machine, _ vm.Config) error {
	conn, err := m.DialGuest(ctx)
	if err != nil {
		return err
	}
	session, err := guest.Open(ctx, conn, token)
	if err != nil {
		return err
	}
	return session.Close()
}

func untilPrinted(ctx context.Context, _ vm.Machine, c vm.Config) error {
	for {
		if text, err := os.ReadFile(c.ConsoleFile); err == nil && bytes.Contains(text, []byte("ready")) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

//go:build linux

package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/vm"
)

// A machine is saved and loaded by QEMU's migration, of everything but the memory,
// which is a shared file and stays where it is
// (https://www.qemu.org/docs/master/devel/migration/main.html). The stream goes
// through a socket whose other end is ours: QEMU itself cannot open files any more.
var migrationCapabilities = map[string]any{"capabilities": []map[string]any{
	{"capability": "x-ignore-shared", "state": true},
}}

const (
	maxState      = 64 << 20        // bytes of a saved state; half a megabyte is usual
	stateDeadline = 5 * time.Second // for saving or loading one, which takes 10 to 60 ms
)

// Save implements vm.Machine.
func (m *machine) Save(ctx context.Context, path string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, stateDeadline)
	defer cancel()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("cannot save the machine: %w", err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(path)
			err = fmt.Errorf("cannot save the machine: %w", err)
		}
	}()
	ours, err := m.stateSocket(ctx)
	if err != nil {
		return err
	}
	defer ours.Close()
	if err := m.monitor.run(ctx, "migrate", map[string]any{"uri": "fd:" + stateFD}, nil); err != nil {
		return err
	}
	if err := m.receiveState(ctx, f, ours); err != nil {
		// A stream that nobody reads would hold the machine for ever.
		m.monitor.run(context.WithoutCancel(ctx), "migrate_cancel", nil, nil)
		return err
	}
	return m.syncAll(f)
}

// receiveState writes down what QEMU sends until it has completed.
func (m *machine) receiveState(ctx context.Context, f *os.File, ours *os.File) error {
	deadline, _ := ctx.Deadline()
	ours.SetReadDeadline(deadline)
	n, err := io.Copy(f, io.LimitReader(ours, maxState))
	if err != nil {
		return err
	}
	if n == maxState {
		return errors.New("its state is too large")
	}
	return m.migrated(ctx)
}

// load gives a machine that was started to wait for it the state at path.
func (m *machine) load(ctx context.Context, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	ours, err := m.stateSocket(ctx)
	if err != nil {
		return err
	}
	defer ours.Close()
	if err := m.monitor.run(ctx, "migrate-incoming", map[string]any{"uri": "fd:" + stateFD}, nil); err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	ours.SetWriteDeadline(deadline)
	if _, err := io.Copy(ours, f); err != nil {
		return err
	}
	ours.Close()
	return m.migrated(ctx)
}

// stateFD is the name QEMU knows its end of the stream by.
const stateFD = "state"

// stateSocket makes a stream and gives QEMU one end of it.
func (m *machine) stateSocket(ctx context.Context) (ours *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "state"), os.NewFile(uintptr(fds[1]), "state")
	defer theirs.Close()
	if err = m.monitor.run(ctx, "migrate-set-capabilities", migrationCapabilities, nil); err == nil {
		err = m.monitor.runWith(ctx, "getfd", map[string]any{"fdname": stateFD}, nil, theirs)
	}
	if err != nil {
		ours.Close()
		return nil, err
	}
	return ours, nil
}

// migrated waits until a migration has come to its end, and says how.
func (m *machine) migrated(ctx context.Context) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		var info struct {
			Status string `json:"status"`
			Desc   string `json:"error-desc"`
		}
		if err := m.monitor.run(ctx, "query-migrate", nil, &info); err != nil {
			return err
		}
		switch info.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("QEMU says: %s", info.Desc)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// syncAll makes the saved state, its name, the memory and the disks durable. QEMU has
// written out what it kept of the disks by then.
func (m *machine) syncAll(state *os.File) error {
	if err := state.Sync(); err != nil {
		return err
	}
	m.mu.Lock()
	paths := []string{filepath.Dir(state.Name()), m.config.MemoryFile}
	for _, d := range m.config.Disks {
		if !d.ReadOnly {
			// Also what lies under it: a machine that was adopted in the middle of a
			// switch may still write there.
			paths = append(append(paths, d.Path), d.Layers...)
		}
	}
	m.mu.Unlock()
	for _, path := range paths {
		if err := syncFile(path); err != nil {
			return err
		}
	}
	return nil
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// SwitchDisk implements vm.Machine.
func (m *machine) SwitchDisk(ctx context.Context, i int, overlay string) error {
	fail := func(err error) error { return fmt.Errorf("cannot switch disk %s: %w", diskID(i), err) }
	top, err := m.topNode(ctx, i)
	if err != nil {
		return fail(err)
	}
	set, err := m.passFile(ctx, overlay)
	if err != nil {
		return fail(err)
	}
	node := fmt.Sprintf("disk%d-%d", i, set)
	dev := blockdev(vm.Disk{Path: fdSetPath(set), Format: vm.Overlay}, node)
	if err := m.monitor.run(ctx, "blockdev-add", dev, nil); err != nil {
		return fail(err)
	}
	if err := m.monitor.run(ctx, "blockdev-snapshot", map[string]any{"node": top, "overlay": node}, nil); err != nil {
		m.monitor.run(ctx, "blockdev-del", map[string]any{"node-name": node}, nil)
		return fail(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d := &m.config.Disks[i]
	d.Path, d.Layers = overlay, append([]string{d.Path}, d.Layers...)
	return nil
}

// topNode asks which file disk number i writes to now.
func (m *machine) topNode(ctx context.Context, i int) (string, error) {
	var devices []struct {
		Device   string `json:"qdev"`
		Inserted struct {
			Node string `json:"node-name"`
		} `json:"inserted"`
	}
	if err := m.monitor.run(ctx, "query-block", nil, &devices); err != nil {
		return "", err
	}
	for _, d := range devices {
		if filepath.Base(filepath.Dir(d.Device)) == diskID(i) || filepath.Base(d.Device) == diskID(i) {
			return d.Inserted.Node, nil
		}
	}
	return "", errors.New("the machine has no such disk")
}

// passFile gives QEMU a file it could not open itself, to write and to read, and
// tells the number of the set they are in.
func (m *machine) passFile(ctx context.Context, path string) (int, error) {
	var added struct {
		Set int `json:"fdset-id"`
	}
	args := map[string]any{}
	for _, mode := range openModes {
		f, err := os.OpenFile(path, mode, 0)
		if err != nil {
			return 0, err
		}
		err = m.monitor.runWith(ctx, "add-fd", args, &added, f)
		f.Close()
		if err != nil {
			return 0, err
		}
		args["fdset-id"] = added.Set
	}
	return added.Set, nil
}

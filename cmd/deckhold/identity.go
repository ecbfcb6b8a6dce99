package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of random(4) that x/sys does not name.
const (
	rndAddEntropy = 0x40085203
	rndReseed     = 0x5207
)

// reseed mixes fresh bytes into the kernel's random pool and has it draw from them at
// once: a machine that was saved, or copied, otherwise goes on with numbers that have
// been given out before, or are given out elsewhere.
func reseed(seed []byte) {
	if len(seed) == 0 {
		return
	}
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, "deckhold: the random pool cannot be reseeded:", err)
		return
	}
	defer f.Close()
	// struct rand_pool_info: the bits it is worth, the bytes there are, the bytes.
	info := binary.NativeEndian.AppendUint32(nil, uint32(len(seed)*8))
	info = binary.NativeEndian.AppendUint32(info, uint32(len(seed)))
	info = append(info, seed...)
	for _, call := range []struct {
		request uintptr
		arg     unsafe.Pointer
	}{{rndAddEntropy, unsafe.Pointer(&info[0])}, {rndReseed, nil}} {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), call.request, uintptr(call.arg)); errno != 0 {
			fmt.Fprintln(os.Stderr, "deckhold: the random pool cannot be reseeded:", errno)
		}
	}
}

// becomeOneself drops the identity of what this machine, or its disk, is a copy of.
func (m *machine) becomeOneself(machineID string) {
	if machineID != "" {
		replaceFile("/etc/machine-id", []byte(machineID+"\n"), 0o444)
	}
	const prefix, suffix = "/etc/ssh/ssh_host_", "_key"
	keys, _ := filepath.Glob(prefix + "*" + suffix)
	for _, key := range keys {
		kind := strings.TrimSuffix(strings.TrimPrefix(key, prefix), suffix)
		note := ""
		if err := m.newHostKey(key, kind); err != nil {
			note = "the SSH host key was removed, and no other could be made: " + err.Error()
		}
		m.steps.done("key "+kind, note)
	}
}

// newHostKey makes an SSH host key of a kind anew, by the root's own ssh-keygen.
func (m *machine) newHostKey(key, kind string) error {
	os.Remove(key)
	os.Remove(key + ".pub")
	const program = "/usr/bin/ssh-keygen"
	argv := []string{program, "-q", "-t", kind, "-N", "", "-C", "root@" + hostname(), "-f", key}
	_, done, err := m.reaper.start(program, argv, &syscall.ProcAttr{Env: []string{"PATH=/usr/bin:/bin", "HOME=/root"}, Files: []uintptr{0, 1, 2}})
	if err != nil {
		return err
	}
	if status := <-done; !status.Exited() || status.ExitStatus() != 0 {
		return fmt.Errorf("ssh-keygen ended with %d", status.ExitStatus())
	}
	return nil
}

func hostname() string {
	name, _ := os.Hostname()
	return name
}

package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// endGrace is what programs get between TERM and KILL when the machine powers off.
const endGrace = 2 * time.Second

// powerOff ends every program, writes everything out and powers the machine off.
func (m *machine) powerOff() {
	m.off.Do(func() {
		unix.Kill(-1, unix.SIGTERM)
		unix.Kill(-1, unix.SIGCONT) // stopped programs hear of it too
		for end := time.Now().Add(endGrace); time.Now().Before(end) && othersRun(); {
			time.Sleep(10 * time.Millisecond)
		}
		unix.Kill(-1, unix.SIGKILL)
		unix.Sync()
		for _, dir := range diskMounts() {
			readOnly(dir)
		}
		unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	})
}

// diskMounts are the places where disks are mounted to be written to.
func diskMounts() (dirs []string) {
	table, _ := os.ReadFile("/proc/mounts")
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 3 && strings.HasPrefix(f[0], "/dev/") && strings.HasPrefix(f[3], "rw") {
			dirs = append(dirs, strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(f[1]))
		}
	}
	return dirs
}

// readOnly makes a mounted file system read-only: its journal is empty then, and the
// disk counts as clean. Programs that were just killed may hold it for a moment.
func readOnly(dir string) {
	for range 50 {
		if unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "") == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	fmt.Fprintln(os.Stderr, "deckhold: still in use:", dir)
}

// othersRun says whether any program but this one runs. Only programs have an exe;
// the kernel's own threads, which no signal ends, have none.
func othersRun() bool {
	links, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, link := range links {
		if _, err := os.Readlink(link); err == nil && link != "/proc/1/exe" {
			return true
		}
	}
	return false
}

// keyPower is KEY_POWER of linux/input-event-codes.h.
const keyPower = 116

// watchPowerButton powers off when the machine's button is pressed.
func watchPowerButton(m *machine) {
	devices, _ := filepath.Glob("/dev/input/event*")
	for _, device := range devices {
		f, err := os.Open(device)
		if err != nil {
			continue
		}
		go func() {
			defer f.Close()
			event := make([]byte, 24) // struct input_event: time, type, code, value
			for {
				if _, err := f.Read(event); err != nil {
					return
				}
				if binary.NativeEndian.Uint16(event[16:]) == 1 && binary.NativeEndian.Uint16(event[18:]) == keyPower {
					m.powerOff()
				}
			}
		}()
	}
}

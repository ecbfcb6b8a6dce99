package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// opSetup makes this machine the sandbox the host says it is.
func (m *machine) opSetup(args json.RawMessage) (any, error) {
	var request guest.SetupRequest
	if err := json.Unmarshal(args, &request); err != nil {
		return nil, err
	}
	if m.problem != nil {
		return nil, m.problem
	}
	m.setup.Lock()
	defer m.setup.Unlock()
	setClock(request.UnixNanos)
	if request.Hostname != "" {
		unix.Sethostname([]byte(request.Hostname))
		writeHosts(request.Hostname)
	}
	setZone(request.TimeZone)
	if current, _ := os.ReadFile("/etc/machine-id"); len(bytes.TrimSpace(current)) < 32 && request.MachineID != "" {
		replaceFile("/etc/machine-id", []byte(request.MachineID+"\n"), 0o444)
	}
	m.steps.done("setup", "")
	bootID, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	var uts unix.Utsname
	unix.Uname(&uts)
	m.steps.mu.Lock()
	defer m.steps.mu.Unlock()
	return guest.SetupResponse{
		Version: version, Kernel: unix.ByteSliceToString(uts.Release[:]),
		BootID: strings.TrimSpace(string(bootID)), Steps: append([]guest.Step{}, m.steps.list...),
	}, nil
}

// writeHosts adds the lines /etc/hosts lacks and leaves the others alone.
func writeHosts(hostname string) {
	current, _ := os.ReadFile("/etc/hosts")
	os.WriteFile("/etc/hostname", []byte(hostname+"\n"), 0o644)
	names := map[string]bool{}
	for line := range strings.Lines(string(current)) {
		line, _, _ = strings.Cut(line, "#")
		if fields := strings.Fields(line); len(fields) > 1 {
			for _, name := range fields[1:] {
				names[name] = true
			}
		}
	}
	var add string
	if !names["localhost"] {
		add += "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	}
	if !names[hostname] {
		add += "127.0.1.1\t" + hostname + "\n"
	}
	if add == "" {
		return
	}
	if len(current) > 0 && current[len(current)-1] != '\n' {
		add = "\n" + add
	}
	replaceFile("/etc/hosts", append(current, add...), 0o644)
}

// setZone makes the zone the system's where the image knows it.
func setZone(zone string) {
	file := filepath.Join("/usr/share/zoneinfo", filepath.Clean("/"+zone))
	if info, err := os.Stat(file); zone == "" || err != nil || info.IsDir() {
		return
	}
	if target, _ := os.Readlink("/etc/localtime"); target == file {
		return
	}
	tmp := "/etc/.localtime.doz"
	os.Remove(tmp)
	if os.Symlink(file, tmp) == nil {
		os.Rename(tmp, "/etc/localtime")
	}
}

// replaceFile puts a file in place whole. A root that cannot be written to keeps
// what it has.
func replaceFile(name string, data []byte, mode os.FileMode) {
	os.MkdirAll(filepath.Dir(name), 0o755)
	tmp := filepath.Join(filepath.Dir(name), "."+filepath.Base(name)+".doz")
	if os.WriteFile(tmp, data, mode) == nil && os.Rename(tmp, name) == nil {
		return
	}
	os.Remove(tmp)
}

func setClock(nanos int64) error {
	if nanos == 0 {
		return nil
	}
	tv := unix.NsecToTimeval(nanos)
	return unix.Settimeofday(&tv)
}

func opClock(args json.RawMessage) (any, error) {
	var request guest.ClockRequest
	if err := json.Unmarshal(args, &request); err != nil {
		return nil, err
	}
	if err := setClock(request.UnixNanos); err != nil {
		return nil, fmt.Errorf("the clock cannot be set: %w", err)
	}
	return guest.ClockResponse{UnixNanos: time.Now().UnixNano()}, nil
}

// stats is what the guest uses now.
func stats() guest.Stats {
	s := guest.Stats{}
	meminfo, _ := os.ReadFile("/proc/meminfo")
	s.MemTotalKiB, s.MemAvailableKiB = field(meminfo, "MemTotal:"), field(meminfo, "MemAvailable:")
	status, _ := os.ReadFile("/proc/self/status")
	s.DeckholdRSSKiB = field(status, "VmRSS:")
	load, _ := os.ReadFile("/proc/loadavg")
	if f := strings.Fields(string(load)); len(f) >= 4 {
		s.Load1, _ = strconv.ParseFloat(f[0], 64)
		_, total, _ := strings.Cut(f[3], "/")
		s.Processes, _ = strconv.Atoi(total)
	}
	var fs unix.Statfs_t
	if unix.Statfs("/", &fs) == nil {
		s.RootTotalKiB = int64(fs.Blocks) * fs.Bsize / 1024
		s.RootFreeKiB = int64(fs.Bavail) * fs.Bsize / 1024
	}
	var up unix.Timespec
	unix.ClockGettime(unix.CLOCK_BOOTTIME, &up)
	s.UptimeMillis = up.Nano() / int64(time.Millisecond)
	return s
}

// field is the number behind a name in a /proc file.
func field(data []byte, name string) int64 {
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				n, _ := strconv.ParseInt(f[0], 10, 64)
				return n
			}
		}
	}
	return 0
}

// endGrace is what programs get between TERM and KILL when the machine powers off.
const endGrace = 2 * time.Second

// powerOff ends every program, writes everything out and powers the machine off.
func (m *machine) powerOff() {
	m.off.Do(func() {
		unix.Kill(-1, unix.SIGTERM)
		for end := time.Now().Add(endGrace); time.Now().Before(end) && othersRun(); {
			time.Sleep(10 * time.Millisecond)
		}
		unix.Kill(-1, unix.SIGKILL)
		unix.Sync()
		unix.Unmount("/run/doz/tools", unix.MNT_DETACH)
		// Read-only means that the journal is empty and the disk counts as clean.
		for range 50 {
			if unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY, "") == nil {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	})
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

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// opSetup makes this machine the sandbox the host says it is.
func (m *machine) opSetup(args json.RawMessage) (any, error) {
	var request guest.SetupRequest
	if err := json.Unmarshal(args, &request); err != nil {
		return nil, &guest.Error{Code: guest.CodeUsage, Message: "the set-up cannot be read: " + err.Error()}
	}
	m.setup.Lock()
	defer m.setup.Unlock()
	setClock(request.UnixNanos)
	reseed(request.Seed)
	m.raise(request.Check)
	if m.problem != nil {
		return nil, m.problem
	}
	if m.device != "" {
		m.grow()
	}
	m.mountTools()
	if request.Hostname != "" {
		unix.Sethostname([]byte(request.Hostname))
		writeHostname(request.Hostname)
		writeHosts(request.Hostname)
	}
	if request.Fresh {
		m.becomeOneself(request.MachineID)
	}
	m.setZone(request.TimeZone)
	if current, _ := os.ReadFile("/etc/machine-id"); len(bytes.TrimSpace(current)) < 32 && request.MachineID != "" {
		replaceFile("/etc/machine-id", []byte(request.MachineID+"\n"), 0o444)
	}
	m.steps.done("setup", "")
	bootID, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	var uts unix.Utsname
	unix.Uname(&uts)
	return guest.SetupResponse{
		Version: version, Kernel: unix.ByteSliceToString(uts.Release[:]),
		BootID: strings.TrimSpace(string(bootID)), Steps: m.steps.all(),
	}, nil
}

// grow grows the root's file system to its disk, once in its life, and writes that
// out before any program runs: ext4 journals only part of it, and a machine that is
// killed in the middle leaves a disk that must be mended.
func (m *machine) grow() {
	if err := growExt4(m.device, "/"); err != nil {
		m.steps.done("grow", "the root file system could not be grown: "+err.Error())
		fmt.Fprintln(os.Stderr, "deckhold: the root file system could not be grown:", err)
	}
}

func writeHostname(hostname string) {
	want := []byte(hostname + "\n")
	if current, _ := os.ReadFile("/etc/hostname"); !bytes.Equal(current, want) {
		replaceFile("/etc/hostname", want, 0o644)
	}
}

// writeHosts adds the lines /etc/hosts lacks and leaves the others alone.
func writeHosts(hostname string) {
	current, err := os.ReadFile("/etc/hosts")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return
	}
	if whole := withHosts(current, hostname); len(whole) > len(current) {
		replaceFile("/etc/hosts", whole, 0o644)
	}
}

// withHosts is a hosts file with the lines it lacks.
func withHosts(current []byte, hostname string) []byte {
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
	if add != "" && len(current) > 0 && current[len(current)-1] != '\n' {
		add = "\n" + add
	}
	return append(bytes.Clone(current), add...)
}

const zoneDir = "/usr/share/zoneinfo"

// setZone makes the zone the system's where the image knows it. Elsewhere programs
// are told in TZ: some carry the zones themselves.
func (m *machine) setZone(zone string) {
	m.zone.Store(nil)
	if zone == "" || !filepath.IsLocal(zone) {
		return
	}
	file := filepath.Join(zoneDir, zone)
	if info, err := os.Stat(file); err != nil || info.IsDir() {
		m.zone.Store(&zone)
		return
	}
	if old, err := os.ReadFile("/etc/timezone"); err == nil && string(bytes.TrimSpace(old)) != zone {
		replaceFile("/etc/timezone", []byte(zone+"\n"), 0o644) // Debian's other record of it
	}
	if target, _ := os.Readlink("/etc/localtime"); target == file {
		return
	}
	const tmp = "/etc/.localtime.doz"
	os.Remove(tmp)
	if os.Symlink(file, tmp) == nil && os.Rename(tmp, "/etc/localtime") != nil {
		os.Remove(tmp)
	}
}

// replaceFile puts a file in place whole, where a link leads if there is one, and
// keeps its mode and owner. A root that cannot be written to keeps what it has.
func replaceFile(name string, data []byte, mode os.FileMode) {
	if target, err := filepath.EvalSymlinks(name); err == nil {
		name = target
	}
	os.MkdirAll(filepath.Dir(name), 0o755)
	tmp := filepath.Join(filepath.Dir(name), "."+filepath.Base(name)+".doz")
	os.Remove(tmp)
	if os.WriteFile(tmp, data, mode) != nil {
		os.Remove(tmp)
		return
	}
	if info, err := os.Stat(name); err == nil {
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			os.Chown(tmp, int(st.Uid), int(st.Gid))
		}
		os.Chmod(tmp, info.Mode())
	}
	if os.Rename(tmp, name) != nil {
		os.Remove(tmp)
	}
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
		return nil, &guest.Error{Code: guest.CodeUsage, Message: "the clock's time cannot be read: " + err.Error()}
	}
	if request.MoveNanos != 0 {
		request.UnixNanos = time.Now().UnixNano() + request.MoveNanos
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

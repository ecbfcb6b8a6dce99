package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

const tokenParam = guest.TokenParam

// machine is what PID 1 knows of the machine it runs.
type machine struct {
	steps   *steps
	reaper  *reaper
	problem error // why there is no usable root disk
	setup   sync.Mutex
	off     sync.Once
}

// steps are the boot's timed steps.
type steps struct {
	mu   sync.Mutex
	list []guest.Step
}

func newSteps() *steps { return &steps{} }

// done notes a step that ends now, on the kernel's clock.
func (s *steps) done(name, note string) {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_BOOTTIME, &t)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, guest.Step{Name: name, Millis: t.Nano() / int64(time.Millisecond), Note: note})
}

// mountBasics mounts what the initramfs needs and gives the kernel's parameters.
func mountBasics() map[string]string {
	mount("devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755")
	mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755")
	params := map[string]string{}
	line, _ := os.ReadFile("/proc/cmdline")
	for _, word := range strings.Fields(string(line)) {
		name, value, _ := strings.Cut(word, "=")
		params[name] = value
	}
	return params
}

// mountRoot makes the machine's root the root, with everything mounted on it that
// programs expect. Without a root disk (a builder) the initramfs stays the root.
func (m *machine) mountRoot(params map[string]string) error {
	var problem error
	root := "/"
	if device := params["doz.root"]; device != "" {
		root = "/newroot"
		if problem = m.mountDisk("/dev/"+device, root); problem != nil {
			root = "/"
		}
	}
	os.MkdirAll("/run/doz/bin", 0o755)
	mount("/doz/bin", "/run/doz/bin", "", unix.MS_BIND, "")
	if device := params["doz.tools"]; device != "" {
		os.MkdirAll("/run/doz/tools", 0o755)
		note := ""
		if err := unix.Mount("/dev/"+device, "/run/doz/tools", toolsFS, unix.MS_RDONLY|unix.MS_NODEV, ""); err != nil {
			note = "the tools disk cannot be mounted: " + err.Error()
		}
		m.steps.done("tools", note)
	}
	if root != "/" {
		if err := switchRoot(root); err != nil {
			return fmt.Errorf("cannot switch to the root disk: %w", err)
		}
	}
	mountRest()
	loopbackUp()
	unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 65536, Max: 1 << 20})
	unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF)
	m.steps.done("root", "")
	return problem
}

// toolsFS is the tools disk's file system.
const toolsFS = "squashfs"

// mountDisk mounts the root disk and grows its file system to the device's size.
func (m *machine) mountDisk(device, at string) error {
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(device, at, "ext4", 0, "discard"); err != nil {
		return fmt.Errorf("the root disk cannot be mounted: %w", err)
	}
	if err := growExt4(device, at); err != nil {
		m.steps.done("grow", "the root file system could not be grown: "+err.Error())
	}
	return nil
}

// switchRoot moves the mounts over and makes root the root.
func switchRoot(root string) error {
	for _, dir := range []string{"/dev", "/proc", "/sys", "/run"} {
		os.Mkdir(root+dir, 0o755)
		if err := unix.Mount(dir, root+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("%s: %w", dir, err)
		}
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// mountRest mounts what programs expect under the final root. What a root has no
// place for is left out.
func mountRest() {
	os.MkdirAll("/dev/pts", 0o755)
	mount("devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666")
	os.MkdirAll("/dev/shm", 0o1777)
	mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
	mount("cgroup2", "/sys/fs/cgroup", "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	for name, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"} {
		if name == "ptmx" {
			os.Remove("/dev/ptmx")
		}
		os.Symlink(target, "/dev/"+name)
	}
	for _, dir := range []string{"/run/lock", "/tmp", "/var/tmp"} {
		if _, err := os.Stat(dir); err != nil {
			os.MkdirAll(dir, 0o755)
			os.Chmod(dir, 0o1777|os.ModeSticky)
		}
	}
	os.MkdirAll(cgroupDir, 0o755)
}

// mount mounts and leaves the complaint to whoever misses it: the roots we run in
// differ.
func mount(source, target, fstype string, flags uintptr, data string) {
	os.MkdirAll(target, 0o755)
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		fmt.Fprintf(os.Stderr, "deckhold: cannot mount %s: %v\n", target, err)
	}
}

// loopbackUp sets the loopback device up; its addresses come with it.
func loopbackUp() {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		fmt.Fprintln(os.Stderr, "deckhold: cannot set up the loopback device:", err)
	}
}

// openPort opens the guest channel's port without blocking: a blocking write to a
// virtio port spins in the kernel (drivers/char/virtio_console.c, __send_to_port).
func openPort() (*os.File, error) {
	for range 500 {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, file := range names {
			name, _ := os.ReadFile(file)
			if strings.TrimSpace(string(name)) != guest.PortName {
				continue
			}
			device := "/dev/" + filepath.Base(filepath.Dir(file))
			fd, err := unix.Open(device, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
			if err == nil {
				return os.NewFile(uintptr(fd), device), nil
			}
		}
		time.Sleep(2 * time.Millisecond)
	}
	return nil, errors.New("there is no port named " + guest.PortName)
}

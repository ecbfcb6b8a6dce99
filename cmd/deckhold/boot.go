package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// machine is what PID 1 knows of the machine it runs.
type machine struct {
	steps  *steps
	reaper *reaper

	up      chan struct{} // closed when the root is in place, or is known not to be
	problem error         // why there is no usable root disk; set before up is closed
	root    string        // the root disk, as in "vda"; "" for a machine without
	tools   string        // likewise the tools disk
	device  string        // the root disk that is mounted; "" when none is

	setup sync.Mutex
	zone  atomic.Pointer[string] // TZ, where the root does not know the time zone
	off   sync.Once

	sessions sessions
}

// steps are the boot's timed steps.
type steps struct {
	mu   sync.Mutex
	list []guest.Step
}

// done notes a step that ends now, on the kernel's clock.
func (s *steps) done(name, note string) {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_BOOTTIME, &t)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, guest.Step{Name: name, Millis: t.Nano() / int64(time.Millisecond), Note: note})
}

// all is every step so far.
func (s *steps) all() []guest.Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list)
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

// raise puts the machine's root in place, once in its life, which the host asks for: a
// machine that was saved before, and is loaded for a sandbox, finds that one's disk
// then. It closes up. The caller holds m.setup, or is alone.
func (m *machine) raise(check bool) {
	select {
	case <-m.up:
		return
	default:
	}
	m.problem = m.mountRoot(check)
	close(m.up)
}

// mountRoot makes the machine's root the root, with everything mounted on it that
// programs expect. Without a root disk (a builder) the initramfs stays the root, and
// so it does when the disk cannot be used, which is returned.
func (m *machine) mountRoot(check bool) error {
	var err error
	if check {
		err = m.check()
	}
	if err == nil {
		err = m.mountDisk()
	}
	if errors.Is(err, unix.EUCLEAN) || errors.Is(err, unix.EBADMSG) {
		if err = m.check(); err == nil {
			err = m.mountDisk()
		}
	}
	if err == nil && m.device != "" {
		err = switchRoot(newRoot)
	}
	mountRest()
	loopbackUp()
	unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 65536, Max: 1 << 20})
	unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF)
	m.steps.done("root", "")
	return err
}

const (
	newRoot  = "/newroot"
	toolsDir = "/run/doz/tools"
)

// mountTools mounts the tools disk, which a sandbox can do without, where it is not
// mounted already.
func (m *machine) mountTools() {
	var fs unix.Statfs_t
	if m.tools == "" || unix.Statfs(toolsDir, &fs) == nil && fs.Type == unix.SQUASHFS_MAGIC {
		return
	}
	os.MkdirAll(toolsDir, 0o755)
	note := ""
	if err := unix.Mount("/dev/"+m.tools, toolsDir, "squashfs", unix.MS_RDONLY|unix.MS_NODEV, ""); err != nil {
		note = "the tools disk cannot be mounted: " + err.Error()
	}
	m.steps.done("tools", note)
}

// mountDisk mounts the root disk. One that the kernel only lets be read, because it
// is damaged, is better than none.
func (m *machine) mountDisk() error {
	if m.root == "" {
		return nil
	}
	device := "/dev/" + m.root
	os.MkdirAll(newRoot, 0o755)
	err := unix.Mount(device, newRoot, "ext4", unix.MS_NOATIME, "discard")
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) {
		err = unix.Mount(device, newRoot, "ext4", unix.MS_NOATIME|unix.MS_RDONLY, "")
		m.steps.done("disk", "the root disk can only be read")
	}
	if err != nil {
		return fmt.Errorf("the root disk cannot be mounted: %w", err)
	}
	m.device = device
	m.steps.done("disk", "")
	return nil
}

// check has e2fsck check a disk and mend it. What a power cut leaves the journal mends
// as it is mounted; this is for what the journal does not know of, as when the file
// system was being grown, and for a disk that was copied from under a running system.
func (m *machine) check() error {
	// It may give up once it has gone back to a spare superblock and played the journal
	// ("unable to set superblock flags"): what is left, it finds when it runs again.
	status, err := m.e2fsck()
	if err == nil && status > mended {
		status, err = m.e2fsck()
		status = max(status, 1)
	}
	if err != nil {
		return fmt.Errorf("the root disk cannot be checked: %w", err)
	}
	if status > mended {
		return errors.New("the root disk is damaged beyond what e2fsck can mend")
	}
	note := ""
	if status > 0 {
		note = "the root disk was damaged; e2fsck mended it"
	}
	m.steps.done("check", note)
	return nil
}

// mended is the highest of e2fsck's exit codes for a file system that is whole now.
const mended = 2

// e2fsck runs it on the root disk and gives its exit code.
func (m *machine) e2fsck() (int, error) {
	program := toolsDir + "/bin/e2fsck"
	_, done, err := m.reaper.start(program, []string{program, "-f", "-y", "/dev/" + m.root}, &syscall.ProcAttr{Files: []uintptr{0, 1, 2}})
	if err != nil {
		return 0, err
	}
	status := <-done
	if !status.Exited() {
		return 0, fmt.Errorf("e2fsck was ended by signal %d", status.Signal())
	}
	return status.ExitStatus(), nil
}

// switchRoot moves the mounts over and makes root the root. When it fails nothing
// has been moved.
func switchRoot(root string) error {
	// /proc last: the places are named through it.
	dirs := []string{"/dev", "/sys", "/run", "/proc"}
	places := make([]int, len(dirs))
	for i, dir := range dirs {
		fd, err := placeIn(root, dir)
		if err != nil {
			return fmt.Errorf("the root disk has no usable folder %s: %w", dir, err)
		}
		defer unix.Close(fd)
		places[i] = fd
	}
	for i, dir := range dirs {
		if err := unix.Mount(dir, fmt.Sprintf("/proc/self/fd/%d", places[i]), "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("cannot move %s to the root disk: %w", dir, err)
		}
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("cannot switch to the root disk: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// placeIn opens the folder dir of a root that is not ours yet, whose links are to be
// read as it will read them, and makes it where it is missing.
func placeIn(root, dir string) (int, error) {
	at, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(at)
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}
	fd, err := unix.Openat2(at, dir, how)
	if errors.Is(err, unix.ENOENT) {
		if err := unix.Mkdirat(at, dir[1:], 0o755); err != nil {
			return -1, err
		}
		fd, err = unix.Openat2(at, dir, how)
	}
	return fd, err
}

// mountRest mounts what programs expect under the final root. What a root has no
// place for is left out.
func mountRest() {
	os.MkdirAll("/dev/pts", 0o755)
	mount("devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666")
	os.MkdirAll("/dev/shm", 0o755)
	mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
	mount("cgroup2", "/sys/fs/cgroup", "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	os.Remove("/dev/ptmx") // devtmpfs's own is another instance's
	for _, link := range [][2]string{{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"}} {
		os.Symlink(link[0], "/dev/"+link[1])
	}
	for _, dir := range []string{"/run/lock", "/tmp", "/var/tmp"} {
		if _, err := os.Stat(dir); err != nil {
			os.MkdirAll(dir, 0o755)
			os.Chmod(dir, 0o777|os.ModeSticky)
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

package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// openPTY makes a terminal: our side of it, which the poller watches, and the
// program's, which belongs to who.
func openPTY(who user, cols, rows int) (ours, theirs *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("there is no terminal left: %w", err)
	}
	ours = os.NewFile(uintptr(fd), "ptmx")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		ours.Close()
		return nil, nil, err
	}
	// By its number and not its name: the root may have mounted another /dev/pts.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		ours.Close()
		return nil, nil, errno
	}
	theirs = os.NewFile(peer, "pts")
	unix.Fchown(int(peer), int(who.uid), ttyGroup)
	unix.Fchmod(int(peer), 0o620)
	// Erasing takes whole characters of UTF-8.
	if t, err := unix.IoctlGetTermios(int(peer), unix.TCGETS); err == nil {
		t.Iflag |= unix.IUTF8
		unix.IoctlSetTermios(int(peer), unix.TCSETS, t)
	}
	setSize(ours, cols, rows)
	return ours, theirs, nil
}

// ttyGroup is the group of terminals, as mountRest mounts them.
const ttyGroup = 5

// setSize tells the program its terminal's size.
func setSize(pty *os.File, cols, rows int) {
	raw, err := pty.SyscallConn()
	if err != nil {
		return
	}
	raw.Control(func(fd uintptr) {
		unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(cols), Row: uint16(rows)})
	})
}

// loginShell is what runs where no program is named.
func loginShell(path, dir string) []string {
	for _, shell := range []string{"bash", "sh"} {
		if _, err := lookupProgram(shell, path, dir); err == nil {
			return []string{shell, "-l"}
		}
	}
	return []string{"/bin/sh", "-l"}
}

// launchSession starts a session's program on a terminal.
func (m *machine) launchSession(open *guest.SessionOpen, cols, rows int) (*session, error) {
	<-m.up
	if m.problem != nil {
		return nil, m.problem
	}
	who, err := lookupUser(open.User)
	if err != nil {
		return nil, err
	}
	vars := map[string]string{"TERM": "xterm-256color", "COLORTERM": "truecolor"}
	for name, value := range open.Env {
		vars[name] = value
	}
	env, path := m.environment(guest.ExecRequest{Env: vars}, who)
	dir := open.Workdir
	if dir == "" {
		dir = who.workdir()
	} else if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return nil, &guest.Error{Code: guest.CodeNotFound, Message: fmt.Sprintf("there is no folder %s", dir)}
	}
	if len(open.Argv) == 0 {
		open.Argv = loginShell(path, dir)
	}
	file, err := lookupProgram(open.Argv[0], path, dir)
	if err != nil {
		return nil, err
	}
	ours, theirs, err := openPTY(who, cols, rows)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	s := newSession(open, ours, cols, rows)
	p := &program{group: newCgroup()}
	if err := m.fork(p, file, open.Argv, []*os.File{theirs, theirs, theirs}, withToolsData(env, file), dir, who, true); err != nil {
		p.group.release()
		ours.Close()
		return nil, err
	}
	s.pid, s.group, s.done = p.pid, p.group, p.done
	return s, nil
}

package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// launch starts the program of a request.
func (m *machine) launch(request guest.ExecRequest) (*program, error) {
	<-m.up
	if m.problem != nil {
		return nil, m.problem
	}
	who, err := lookupUser(request.User)
	if err != nil {
		return nil, err
	}
	env, path := m.environment(request, who)
	dir := request.Workdir
	if dir == "" {
		dir = who.workdir()
	} else if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return nil, &guest.Error{Code: guest.CodeNotFound, Message: fmt.Sprintf("there is no folder %s", dir)}
	}
	file, err := lookupProgram(request.Argv[0], path, dir)
	if err != nil {
		return nil, err
	}
	p := &program{}
	theirs, err := p.connect(request.Stdin)
	defer closeAll(theirs)
	if err == nil {
		p.group = newCgroup()
		err = m.fork(p, file, request.Argv, theirs, withToolsData(env, file), dir, who, false)
	}
	if err != nil {
		p.discard()
		return nil, err
	}
	return p, nil
}

// fork starts file as the program, in a session of its own, whose terminal, if it has
// one, is its first file.
func (m *machine) fork(p *program, file string, argv []string, files []*os.File, env []string, dir string, who user, tty bool) error {
	attr := &syscall.ProcAttr{Dir: dir, Env: env, Sys: &syscall.SysProcAttr{Setsid: true, Setctty: tty, Credential: who.credential()}}
	for _, f := range files {
		attr.Files = append(attr.Files, f.Fd())
	}
	p.group.join(attr.Sys)
	var err error
	p.pid, p.done, err = m.reaper.start(file, argv, attr)
	if errors.Is(err, unix.ENOEXEC) {
		// A script that does not name its interpreter is the shell's, as everywhere.
		p.pid, p.done, err = m.reaper.start("/bin/sh", append([]string{"sh", file}, argv[1:]...), attr)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT):
		return &guest.Error{Code: guest.CodeNotFound, Message: fmt.Sprintf("%s cannot be run: its interpreter is missing", argv[0])}
	case errors.Is(err, unix.ENOEXEC):
		return &guest.Error{Code: guest.CodeNotAllowed, Message: fmt.Sprintf("%s is not a program for this machine", argv[0])}
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return &guest.Error{Code: guest.CodeNotAllowed, Message: fmt.Sprintf("%s cannot be run: user %s may not, or may not enter %s", argv[0], who.name, dir)}
	}
	return fmt.Errorf("%s cannot be run: %w", argv[0], err)
}

// connect makes the program's pipes, and gives its ends of them.
func (p *program) connect(stdin bool) (theirs []*os.File, err error) {
	if stdin {
		ours, its, err := pipe(true)
		if err != nil {
			return nil, err
		}
		unix.FcntlInt(uintptr(fdOf(ours)), unix.F_SETPIPE_SZ, pipeSize)
		p.stdin, theirs = ours, append(theirs, its)
	} else {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return nil, err
		}
		theirs = append(theirs, null)
	}
	for _, o := range []struct {
		typ byte
		out **output
	}{{guest.Stdout, &p.stdout}, {guest.Stderr, &p.stderr}} {
		ours, its, err := pipe(false)
		if err != nil {
			return theirs, err
		}
		*o.out = &output{typ: o.typ, pipe: ours, fd: fdOf(ours), drained: make(chan struct{})}
		theirs = append(theirs, its)
	}
	return theirs, nil
}

// discard gives back what a program that did not start had.
func (p *program) discard() {
	if p.stdin != nil {
		p.stdin.Close()
	}
	for _, o := range []*output{p.stdout, p.stderr} {
		if o != nil {
			o.pipe.Close()
		}
	}
	if p.group != nil {
		p.group.release()
	}
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// pipe makes a pipe. The program's end blocks, as programs expect; ours does
// not, so that deadlines work on it.
func pipe(weWrite bool) (ours, theirs *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	mine, its := fds[0], fds[1]
	if weWrite {
		mine, its = its, mine
	}
	unix.SetNonblock(mine, true)
	return os.NewFile(uintptr(mine), "pipe"), os.NewFile(uintptr(its), "pipe"), nil
}

// fdOf is a file's descriptor, which stays the poller's (Fd would take it away).
func fdOf(f *os.File) (fd int) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1
	}
	raw.Control(func(n uintptr) { fd = int(n) })
	return fd
}

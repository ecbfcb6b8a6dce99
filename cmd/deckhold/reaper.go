package main

import (
	"errors"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper waits for every child of PID 1: the programs started here, which somebody
// waits for, and the orphans that fell to it, which nobody does.
type reaper struct {
	started chan struct{} // there may be children again

	mu      sync.Mutex // held while a program starts, and while a child is reaped
	waiting map[int]chan syscall.WaitStatus
}

func startReaper() *reaper {
	r := &reaper{waiting: map[int]chan syscall.WaitStatus{}, started: make(chan struct{}, 1)}
	go r.run()
	return r
}

// run waits in the kernel and not for SIGCHLD, which takes longer.
func (r *reaper) run() {
	for {
		var info unix.Siginfo
		// The child stays until the lock is held: it may have been started just now.
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		switch {
		case errors.Is(err, unix.ECHILD):
			<-r.started // without children there are no orphans either
		case err == nil:
			r.reap()
		}
	}
}

func (r *reaper) reap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 || err != nil {
			return
		}
		if done := r.waiting[pid]; done != nil {
			done <- status
			delete(r.waiting, pid)
		}
	}
}

// start starts a program; its end arrives on the channel. The lock keeps the reaper
// from seeing the end before the program is known.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (int, <-chan syscall.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return 0, nil, err
	}
	done := make(chan syscall.WaitStatus, 1)
	r.waiting[pid] = done
	select {
	case r.started <- struct{}{}:
	default:
	}
	return pid, done, nil
}

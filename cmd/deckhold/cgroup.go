package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// cgroupDir holds a group for each program that exec started.
const cgroupDir = "/sys/fs/cgroup/doz"

// groups are the empty groups: making and removing one takes longer than starting a
// program in it.
var groups struct {
	mu    sync.Mutex
	free  []*cgroup
	count int64
}

// groupsKept is how many empty groups are kept.
const groupsKept = 4

// cgroup is a program's whole tree: nothing it starts leaves it. Without cgroups
// (dir is empty) the program's process group has to do.
type cgroup struct {
	dir string
	fd  *os.File
}

func newCgroup() *cgroup {
	groups.mu.Lock()
	defer groups.mu.Unlock()
	if n := len(groups.free); n > 0 {
		g := groups.free[n-1]
		groups.free = groups.free[:n-1]
		return g
	}
	groups.count++
	dir := filepath.Join(cgroupDir, "exec-"+strconv.FormatInt(groups.count, 10))
	if os.Mkdir(dir, 0o755) != nil {
		return &cgroup{}
	}
	fd, err := os.Open(dir)
	if err != nil {
		os.Remove(dir)
		return &cgroup{}
	}
	return &cgroup{dir: dir, fd: fd}
}

// join makes the program to be started a member.
func (g *cgroup) join(attr *syscall.SysProcAttr) {
	if g.fd != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, int(g.fd.Fd())
	}
}

// kill ends the whole tree at once.
func (g *cgroup) kill(pid int) {
	if g.dir == "" || os.WriteFile(g.dir+"/cgroup.kill", []byte("1"), 0) != nil {
		unix.Kill(-pid, unix.SIGKILL)
	}
}

// signal sends sig to every process of the tree.
func (g *cgroup) signal(pid int, sig syscall.Signal) {
	procs, err := os.ReadFile(g.dir + "/cgroup.procs")
	if g.dir == "" || err != nil {
		unix.Kill(-pid, sig)
		return
	}
	for _, field := range strings.Fields(string(procs)) {
		if member, err := strconv.Atoi(field); err == nil && member > 1 {
			unix.Kill(member, sig)
		}
	}
}

// release gives the group back. What a program left running moves up a level.
func (g *cgroup) release() {
	if g.fd == nil {
		return
	}
	procs, err := os.ReadFile(g.dir + "/cgroup.procs")
	for _, field := range bytes.Fields(procs) {
		os.WriteFile(cgroupDir+"/cgroup.procs", field, 0)
	}
	groups.mu.Lock()
	if err == nil && len(procs) == 0 && len(groups.free) < groupsKept {
		groups.free = append(groups.free, g)
		groups.mu.Unlock()
		return
	}
	groups.mu.Unlock()
	g.fd.Close()
	os.Remove(g.dir)
}

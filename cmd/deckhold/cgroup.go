package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// cgroupDir holds a group for each program that exec started.
const cgroupDir = "/sys/fs/cgroup/doz"

var groups atomic.Int64

// cgroup is a program's whole tree: nothing it starts leaves it. Without cgroups
// (dir is empty) the program's process group has to do.
type cgroup struct {
	dir string
	fd  *os.File
}

func newCgroup() *cgroup {
	dir := filepath.Join(cgroupDir, "exec-"+strconv.FormatInt(groups.Add(1), 10))
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

// remove gives the group back. What a program left running moves up a level.
func (g *cgroup) remove() {
	if g.fd == nil {
		return
	}
	g.fd.Close()
	if os.Remove(g.dir) == nil {
		return
	}
	procs, _ := os.ReadFile(g.dir + "/cgroup.procs")
	for _, field := range strings.Fields(string(procs)) {
		os.WriteFile(cgroupDir+"/cgroup.procs", []byte(field), 0)
	}
	os.Remove(g.dir)
}

package main

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"dozable.com/doz/internal/guest"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/doz/tools/bin"

// user is who a program runs as.
type user struct {
	name   string
	uid    uint32
	gid    uint32
	groups []uint32
	home   string
}

const (
	passwdFile = "/etc/passwd"
	groupFile  = "/etc/group"
)

// users remembers who was looked up: reading the two files takes as long as starting
// a program.
var users struct {
	mu    sync.Mutex
	files [2]fileState
	known map[string]user
}

// fileState tells whether a file is the one it was.
type fileState struct {
	inode uint64
	size  int64
	time  syscall.Timespec
}

func stateOf(file string) (s fileState) {
	var st syscall.Stat_t
	if syscall.Stat(file, &st) == nil {
		s = fileState{st.Ino, st.Size, st.Ctim}
	}
	return s
}

// usersKept is how many users are remembered.
const usersKept = 64

// lookupUser reads name, uid, or either with ":group". Numbers need no entry in
// /etc/passwd, and neither does root.
func lookupUser(spec string) (user, error) {
	files := [2]fileState{stateOf(passwdFile), stateOf(groupFile)}
	users.mu.Lock()
	defer users.mu.Unlock()
	if users.known == nil || users.files != files || len(users.known) > usersKept {
		users.files, users.known = files, map[string]user{}
	}
	if u, ok := users.known[spec]; ok {
		return u, nil
	}
	u, err := readUser(spec, passwdFile, groupFile)
	if err == nil {
		users.known[spec] = u
	}
	return u, err
}

func readUser(spec, passwd, groups string) (user, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	if name == "" {
		name = "root"
	}
	u := user{name: name, home: "/"}
	id, err := strconv.ParseUint(name, 10, 32)
	u.uid = uint32(id)
	known := find(passwd, func(f []string) bool {
		// A damaged line must not make anybody root.
		return len(f) >= 6 && (f[0] == name || f[2] == name) && isID(f[2]) && isID(f[3])
	}, func(f []string) {
		u = user{name: f[0], uid: number(f[2]), gid: number(f[3]), home: f[5]}
	})
	switch {
	case known || err == nil && id != 0:
	case err == nil || name == "root":
		u = user{name: "root", home: "/root"}
	default:
		return u, &guest.Error{Code: guest.CodeNotFound, Message: fmt.Sprintf("there is no user %q", name)}
	}
	find(groups, func(f []string) bool {
		if len(f) >= 4 && isID(f[2]) && slices.Contains(strings.Split(f[3], ","), u.name) {
			u.groups = append(u.groups, number(f[2]))
		}
		return false
	}, nil)
	if hasGroup {
		if id, err := strconv.ParseUint(group, 10, 32); err == nil {
			u.gid = uint32(id)
		} else if !find(groups, func(f []string) bool { return len(f) >= 3 && f[0] == group && isID(f[2]) }, func(f []string) { u.gid = number(f[2]) }) {
			return u, &guest.Error{Code: guest.CodeNotFound, Message: fmt.Sprintf("there is no group %q", group)}
		}
	}
	return u, nil
}

// find gives the first line of a colon-separated file that matches to use.
func find(file string, match func([]string) bool, use func([]string)) bool {
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20) // a group with many members
	for lines.Scan() {
		fields := strings.Split(lines.Text(), ":")
		if match(fields) {
			if use != nil {
				use(fields)
			}
			return true
		}
	}
	return false
}

func isID(s string) bool {
	_, err := strconv.ParseUint(s, 10, 32)
	return err == nil
}

func number(s string) uint32 {
	n, _ := strconv.ParseUint(s, 10, 32)
	return uint32(n)
}

// credential is nil for root: nothing to change, and one system call less to fail.
func (u user) credential() *syscall.Credential {
	if u.uid == 0 && u.gid == 0 && len(u.groups) == 0 {
		return nil
	}
	return &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}
}

// workdir is the user's home, or / when there is none.
func (u user) workdir() string {
	if info, err := os.Stat(u.home); err == nil && info.IsDir() {
		return u.home
	}
	return "/"
}

// environment is the program's, and the PATH to find it on.
func (m *machine) environment(request guest.ExecRequest, u user) (env []string, path string) {
	vars := map[string]string{"PATH": defaultPath, "HOME": u.home, "USER": u.name, "LOGNAME": u.name, "LANG": "C.UTF-8", "TERM": "dumb"}
	if zone := m.zone.Load(); zone != nil {
		vars["TZ"] = *zone
	}
	for name, value := range request.Env {
		vars[name] = value
	}
	for name, value := range vars {
		if name != "" && !strings.ContainsAny(name, "=\x00") && !strings.Contains(value, "\x00") {
			env = append(env, name+"="+value)
		}
	}
	slices.Sort(env)
	return env, vars["PATH"]
}

// toolsEnvironment is what programs of the tools layer need in a root that lacks their
// data (guest/tools/README.md). It is for them alone: the root's own programs have
// their data where they look for it.
var toolsEnvironment = map[string]string{
	"LOCPATH":         toolsDir + "/share/locale",
	"TERMINFO_DIRS":   ":" + toolsDir + "/share/terminfo",
	"ALSA_CONFIG_DIR": toolsDir + "/share/alsa",
	"MKE2FS_CONFIG":   toolsDir + "/share/mke2fs.conf",
}

// withToolsData adds to a program's environment what it needs if it is of the tools
// layer, as far as env does not say otherwise.
func withToolsData(env []string, program string) []string {
	if !strings.HasPrefix(program, toolsDir+"/") {
		return env
	}
	for name, value := range toolsEnvironment {
		if !slices.ContainsFunc(env, func(pair string) bool { return strings.HasPrefix(pair, name+"=") }) {
			env = append(env, name+"="+value)
		}
	}
	slices.Sort(env)
	return env
}

// lookupProgram finds a program as a shell would.
func lookupProgram(name, path, dir string) (string, error) {
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = candidates[:0]
		for _, d := range filepath.SplitList(path) {
			if !filepath.IsAbs(d) {
				d = filepath.Join(dir, d) // an empty one too: where the program will run
			}
			candidates = append(candidates, filepath.Join(d, name))
		}
	} else if !filepath.IsAbs(name) {
		candidates[0] = filepath.Join(dir, name)
	}
	found := false
	for _, c := range candidates {
		info, err := os.Stat(c)
		if err != nil || info.IsDir() {
			continue
		}
		if info.Mode()&0o111 != 0 {
			return c, nil
		}
		found = true
	}
	if found {
		return "", &guest.Error{Code: guest.CodeNotAllowed, Message: fmt.Sprintf("%s is not executable", name)}
	}
	if strings.Contains(name, "/") {
		return "", &guest.Error{Code: guest.CodeNotFound, Message: fmt.Sprintf("there is no program %s", name)}
	}
	return "", &guest.Error{Code: guest.CodeNotFound, Message: fmt.Sprintf("%s is not on the guest's PATH", name)}
}

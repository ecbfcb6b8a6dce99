package vm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"dozable.com/doz/internal/api"
)

// counting starts a program that counts in a file ten times a second, and gives its pid
// in the guest.
func counting(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(shared.ok(t, "exec", name, "--", "sh", "-c",
		`sh -c 'i=0; while :; do i=$((i+1)); echo $i >/run/count; sleep 0.1; done' >/dev/null 2>&1 & echo $!`))
}

// count gives how far a program that counts has come, and its pid, if it still is one.
func count(t *testing.T, name string) (n int, pid string) {
	t.Helper()
	out := shared.ok(t, "exec", name, "--", "sh", "-c", "n=; while [ -z $n ]; do n=$(cat /run/count); done; echo $n; pgrep -of run/count") // it is empty for a moment
	fields := strings.Fields(out)
	if len(fields) != 2 {
		t.Fatalf("%s does not count: %q", name, out)
	}
	n, err := strconv.Atoi(fields[0])
	if err != nil {
		t.Fatalf("%s counts %q", name, out)
	}
	return n, fields[1]
}

// bootID is the guest's own mark of its boot.
func bootID(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(shared.ok(t, "exec", name, "--", "cat", "/proc/sys/kernel/random/boot_id"))
}

// clockError is by how much a guest's clock is certainly wrong: it is read between two
// readings of this computer's.
func clockError(t *testing.T, name string) time.Duration {
	t.Helper()
	before := time.Now()
	out := strings.TrimSpace(shared.ok(t, "exec", name, "--", "date", "+%s.%N"))
	after := time.Now()
	seconds, nanos, _ := strings.Cut(out, ".")
	s, err1 := strconv.ParseInt(seconds, 10, 64)
	n, err2 := strconv.ParseInt(nanos, 10, 64)
	if err1 != nil || err2 != nil {
		t.Fatalf("date says %q", out)
	}
	guest := time.Unix(s, n)
	return max(before.Sub(guest), guest.Sub(after), 0)
}

const clockRight = 50 * time.Millisecond

// TestRest goes through every way of coming to rest: the programs carry on from where
// they were, and the clock is right.
func TestRest(t *testing.T) {
	d := shared
	d.sandbox(t, "rest")
	pid := counting(t, "rest")
	boot := bootID(t, "rest")
	last, _ := count(t, "rest")
	for _, ops := range [][]string{{"pause", "resume"}, {"sleep", "wake"}, {"hibernate", "wake"}, {"pause", "sleep", "hibernate", "start"}, {"hibernate", "exec"}} {
		for _, op := range ops {
			if op == "exec" {
				break // count does
			}
			d.ok(t, op, "rest")
			v := d.inspect(t, "rest")
			if v.Phase == api.Hibernated && (d.machinesOf("rest") != 0 || v.Snapshot == nil || v.MemoryBytes != 0) {
				t.Errorf("hibernated: %+v, with %d machines", v, d.machinesOf("rest"))
			}
		}
		n, same := count(t, "rest")
		if n < last || same != pid || bootID(t, "rest") != boot {
			t.Errorf("after %v process %s has counted to %d; before, process %s to %d", ops, same, n, pid, last)
		}
		last = n
		if wrong := clockError(t, "rest"); wrong > clockRight {
			t.Errorf("after %v the clock is wrong by %s", ops, wrong)
		}
		if v := d.inspect(t, "rest"); v.Phase != api.Running || v.Snapshot != nil {
			t.Errorf("after %v: %+v", ops, v)
		}
	}
	for _, op := range []string{"resume"} {
		if r := d.run(t, "", op, "rest"); r.code != 3 {
			t.Errorf("%s of a running sandbox: %+v", op, r)
		}
	}
}

// machinesOf counts a sandbox's machine processes.
func (d doz) machinesOf(name string) (n int) {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		if cwd, err := os.Readlink(link); err == nil && strings.HasPrefix(cwd, filepath.Join(d.store, "sandboxes", name)+"/") {
			n++
		}
	}
	return n
}

// TestHibernateCycles wakes and hibernates with writes that the guest has not synced:
// each file holds afterwards what was written to it.
func TestHibernateCycles(t *testing.T) {
	d := shared
	d.sandbox(t, "cycles")
	const cycles = 20
	for i := range cycles {
		out := d.ok(t, "exec", "cycles", "--", "sh", "-c", fmt.Sprintf(
			"sha256sum -c --quiet /root/*.sum 2>&1; head -c 300000 /dev/urandom >/root/%d && cd /root && sha256sum %d >/root/%d.sum", i, i, i))
		if i > 0 && out != "" {
			t.Fatalf("after %d cycles: %s", i, out)
		}
		d.ok(t, "hibernate", "cycles")
	}
	if out := d.ok(t, "exec", "cycles", "--", "sh", "-c", "cd /root && sha256sum -c --quiet *.sum && ls | wc -l"); strings.TrimSpace(out) != strconv.Itoa(2*cycles) {
		t.Errorf("after %d cycles: %s", cycles, out)
	}
	v := d.inspect(t, "cycles")
	if entries, err := os.ReadDir(v.Dir); err != nil || len(entries) > 6 {
		t.Errorf("its folder has grown: %v (%v)", entries, err)
	}
}

// TestEverythingKilledAsleep kills host and machine of a sleeper, as a power cut does.
func TestEverythingKilledAsleep(t *testing.T) {
	d := shared
	d.sandbox(t, "power")
	counting(t, "power")
	boot := bootID(t, "power")
	d.ok(t, "sleep", "power")
	pid := d.inspect(t, "power").PID
	kill(t, d.host(t))
	kill(t, pid)
	if out := d.ok(t, "ls"); !strings.Contains(out, "hibernated") {
		t.Errorf("ls:\n%s", out)
	}
	if bootID(t, "power") != boot {
		t.Error("it woke as something else")
	}
	count(t, "power")

	// And one that slept in place, with a host that is another.
	d.ok(t, "sleep", "power")
	kill(t, d.host(t))
	if v := d.inspect(t, "power"); v.Phase != api.Asleep || v.PID == 0 {
		t.Errorf("a sleeper whose host was killed: %+v", v)
	}
	d.ok(t, "wake", "power")
	if bootID(t, "power") != boot {
		t.Error("it woke as something else")
	}
}

// TestDamagedSnapshot refuses to wake what is not what was saved, and wakes what is.
func TestDamagedSnapshot(t *testing.T) {
	d := shared
	d.sandbox(t, "harm")
	boot := bootID(t, "harm")
	d.ok(t, "hibernate", "harm")
	memory := filepath.Join(d.inspect(t, "harm").Dir, "memory")
	flip := func() {
		f, err := os.OpenFile(memory, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		one := make([]byte, 1)
		const where = 16<<20 + 5 // in the kernel's text
		if _, err := f.ReadAt(one, where); err != nil {
			t.Fatal(err)
		}
		one[0] ^= 4
		if _, err := f.WriteAt(one, where); err != nil {
			t.Fatal(err)
		}
	}
	flip()
	r := d.run(t, "", "wake", "harm")
	if r.code != 1 || !strings.Contains(r.err, "damaged") || strings.Count(r.err, "\n") != 2 {
		t.Errorf("a wake from damaged memory: %+v", r)
	}
	if r := d.run(t, "", "exec", "harm", "--", "true"); r.code != 125 {
		t.Errorf("exec then: %+v", r)
	}
	if n := d.machinesOf("harm"); n != 0 || d.inspect(t, "harm").Phase != api.Hibernated {
		t.Errorf("after that %d machines run, and it is %s", n, d.inspect(t, "harm").Phase)
	}
	flip()
	if bootID(t, "harm") != boot {
		t.Error("it woke as something else")
	}
}

// TestFork copies a running sandbox: both go on, and are two.
func TestFork(t *testing.T) {
	d := shared
	d.sandbox(t, "fork")
	d.ok(t, "exec", "fork", "--", "sh", "-c", "echo before >/root/file")
	counting(t, "fork")
	before, pid := count(t, "fork")
	boot := bootID(t, "fork")
	d.ok(t, "fork", "fork", "copy", "--count", "2")
	identity := func(name string) []string {
		return strings.Fields(d.ok(t, "exec", name, "--", "sh", "-c", "hostname; cat /etc/machine-id; head -c 32 /dev/urandom | sha256sum | cut -c1-64"))
	}
	seen := identity("fork")
	for _, name := range []string{"copy-1", "copy-2"} {
		t.Cleanup(func() { d.ok(t, "rm", "--yes", name) })
		if n, same := count(t, name); n < before || same != pid {
			t.Errorf("%s: process %s has counted to %d; before, process %s to %d", name, same, n, pid, before)
		}
		for _, what := range identity(name) {
			if slices.Contains(seen, what) {
				t.Errorf("%s shares %s", name, what)
			}
			seen = append(seen, what)
		}
		if wrong := clockError(t, name); wrong > clockRight {
			t.Errorf("%s: the clock is wrong by %s", name, wrong)
		}
		// What one writes the others do not see.
		if out := d.ok(t, "exec", name, "--", "sh", "-c", "cat /root/file; echo "+name+" >/root/file; sync"); out != "before\n" {
			t.Errorf("%s has %q", name, out)
		}
	}
	if n, same := count(t, "fork"); n < before || same != pid || bootID(t, "fork") != boot {
		t.Errorf("the original: process %s has counted to %d", same, n)
	}
	if out := d.ok(t, "exec", "fork", "--", "cat", "/root/file"); out != "before\n" {
		t.Errorf("the original has %q", out)
	}
	// And whole when they are woken from their disks.
	d.ok(t, "hibernate", "copy-1")
	if out := d.ok(t, "exec", "copy-1", "--", "cat", "/root/file"); out != "copy-1\n" {
		t.Errorf("copy-1 woke with %q", out)
	}
}

// TestPoints keeps a running sandbox with and without its memory, and goes back.
func TestPoints(t *testing.T) {
	d := shared
	d.sandbox(t, "points")
	d.ok(t, "exec", "points", "--", "sh", "-c", "echo first >/root/file")
	d.ok(t, "point", "take", "points", "disk only", "--note", "a note")
	d.ok(t, "exec", "points", "--", "sh", "-c", "echo second >/root/file")
	counting(t, "points")
	kept, pid := count(t, "points")
	boot := bootID(t, "points")
	d.ok(t, "point", "take", "points", "all of it", "--memory")
	d.ok(t, "exec", "points", "--", "sh", "-c", "echo third >/root/file; rm -rf /usr/bin/git; pkill -f run/[c]ount")

	if r := d.run(t, "", "point", "revert", "points", "disk only"); r.code != 5 || !strings.Contains(r.err, "disk only") || !strings.Contains(r.err, "rp-") {
		t.Errorf("a revert without a yes: %+v", r)
	}
	d.ok(t, "point", "revert", "points", "disk", "--yes")
	if out := d.ok(t, "exec", "points", "--", "cat", "/root/file"); out != "first\n" {
		t.Errorf("back at the first point there is %q", out)
	}
	if out := d.ok(t, "console", "points", "--steps"); !strings.Contains(out, "check") {
		t.Errorf("a disk kept from under a running system was not checked:\n%s", out)
	}
	d.ok(t, "point", "revert", "points", "all", "--yes")
	if n, same := count(t, "points"); n < kept || same != pid || bootID(t, "points") != boot {
		t.Errorf("back at the point with memory process %s has counted to %d", same, n)
	}
	if out := d.ok(t, "exec", "points", "--", "sh", "-c", "cat /root/file; ls /usr/bin/git"); out != "second\n/usr/bin/git\n" {
		t.Errorf("back at the point with memory there is %q", out)
	}
	var points []api.Point
	if err := json.Unmarshal([]byte(d.ok(t, "point", "ls", "points", "--json")), &points); err != nil || len(points) != 4 {
		t.Errorf("points: %+v (%v)", points, err)
	}
	for _, p := range points {
		d.ok(t, "point", "rm", "points", p.ID, "--yes")
	}
	d.ok(t, "exec", "points", "--", "cat", "/root/file")
}

// TestTemplate makes an image of a running sandbox's disk, which outlives the sandbox.
func TestTemplate(t *testing.T) {
	d := shared
	d.ok(t, "create", "model")
	d.ok(t, "exec", "model", "--", "sh", "-c", "echo made >/root/file")
	d.ok(t, "template", "create", "model", "--as", "mine")
	if r := d.run(t, "", "template", "create", "model", "--as", "mine"); r.code != 4 {
		t.Errorf("a template over another: %+v", r)
	}
	d.ok(t, "rm", "--yes", "model")
	d.ok(t, "create", "made", "--image", "mine")
	if out := d.ok(t, "exec", "made", "--", "sh", "-c", "cat /root/file; hostname"); out != "made\nmade\n" {
		t.Errorf("made of a template: %q", out)
	}
	if r := d.run(t, "", "template", "rm", "--yes", "mine"); r.code != 1 {
		t.Errorf("a template in use was removed: %+v", r)
	}
	d.ok(t, "rm", "--yes", "made")
	d.ok(t, "template", "rm", "--yes", "mine")
}

// TestManyFromOneTemplate starts 20 sandboxes of one shape, from one boot template, at most four at a time, and
// compares all by which one machine is told from another.
func TestManyFromOneTemplate(t *testing.T) {
	d := shared
	// Keys in the image's disk, which each of its sandboxes begins with.
	d.sandbox(t, "keys")
	d.ok(t, "exec", "keys", "--", "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/etc/ssh/ssh_host_ed25519_key")
	d.ok(t, "shutdown", "--yes", "keys")
	const many = 20
	const marks = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; head -c 32 /dev/urandom | sha256sum | cut -c1-64; cut -d' ' -f2 /etc/ssh/ssh_host_*.pub"
	results, turns := make(chan result), make(chan struct{}, 4)
	for i := range many {
		name := fmt.Sprintf("many-%d", i)
		d.ok(t, "duplicate", "keys", name)
		t.Cleanup(func() { d.ok(t, "rm", "--yes", name) })
		go func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			r := d.run(t, "", "exec", name, "--", "sh", "-c", marks)
			d.run(t, "", "hibernate", name) // so that not all are in memory at once
			results <- r
		}()
	}
	seen := map[string]string{}
	for range many {
		r := <-results
		found := strings.Fields(r.out)
		if len(found) != 4+1 {
			t.Errorf("%d marks of %+v", len(found), r)
			continue
		}
		for _, what := range found {
			if other := seen[what]; other != "" {
				t.Errorf("%s and %s share %s", other, found[0], what)
			}
			seen[what] = found[0]
		}
	}
	templates, err := filepath.Glob(filepath.Join(d.store, "templates", "*", "template.json"))
	if err != nil || len(templates) > 2 {
		t.Errorf("templates: %v (%v)", templates, err)
	}
}

// TestHostStop hibernates what runs, and it goes on.
func TestHostStop(t *testing.T) {
	d := shared
	d.sandbox(t, "stop")
	boot := bootID(t, "stop")
	out := d.ok(t, "host", "stop")
	if !strings.Contains(out, "stop: hibernated after") || d.machines() != 0 {
		t.Errorf("host stop, with %d machines left:\n%s", d.machines(), out)
	}
	if bootID(t, "stop") != boot {
		t.Error("it woke as something else")
	}
}

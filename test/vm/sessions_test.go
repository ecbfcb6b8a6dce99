package vm

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"dozable.com/doz/internal/api"
)

// tmux is a terminal to look at: a tmux server of the test's own.
type tmux struct {
	t   *testing.T
	dir string
}

// terminal starts one of 80 × 24 with a shell in it that finds doz.
func (d doz) terminal(t *testing.T) tmux {
	t.Helper()
	m := tmux{t, t.TempDir()}
	t.Cleanup(func() { m.command("kill-server").Run() })
	m.do("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24",
		"env", "PS1=outside> ", "DOZ_STORE="+d.store, "DOZ_PARTS=", "DOZ="+d.program, "bash", "--norc")
	m.until("outside>")
	return m
}

func (m tmux) command(args ...string) *exec.Cmd {
	cmd := exec.Command("tmux", append([]string{"-u"}, args...)...)
	cmd.Env = append(os.Environ(), "TMUX_TMPDIR="+m.dir, "TMUX=")
	return cmd
}

func (m tmux) do(args ...string) string {
	m.t.Helper()
	out, err := m.command(args...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("tmux %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// line types a line; key presses keys by tmux's names.
func (m tmux) line(text string) { m.t.Helper(); m.do("send-keys", "-l", text); m.key("Enter") }

func (m tmux) key(names ...string) {
	m.t.Helper()
	m.do(append([]string{"send-keys"}, names...)...)
}

// screen is the text shown, with its looks, and what tmux knows of its state.
func (m tmux) screen() string {
	m.t.Helper()
	return m.do("capture-pane", "-p", "-e") + m.do("display-message", "-p",
		"cursor #{cursor_x},#{cursor_y} shown #{cursor_flag} alternate #{alternate_on} insert #{insert_flag} keypad #{keypad_flag} keys #{keypad_cursor_flag} mouse #{mouse_any_flag}#{mouse_sgr_flag} wrap #{wrap_flag} origin #{origin_flag} region #{scroll_region_upper}-#{scroll_region_lower}")
}

func (m tmux) plain() string { m.t.Helper(); return m.do("capture-pane", "-p") }

// until waits until the terminal shows text.
func (m tmux) until(text string) {
	m.t.Helper()
	for end := time.Now().Add(patience); !strings.Contains(m.plain(), text); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Fatalf("%q is never shown; there is:\n%s", text, m.plain())
		}
	}
}

// untilState waits until the screen and its state are as wanted.
func (m tmux) untilState(wanted func(now string) bool) {
	m.t.Helper()
	for end := time.Now().Add(patience); !wanted(m.screen()); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Fatalf("the terminal never gets as wanted; there is:\n%s", m.screen())
		}
	}
}

// settled is the screen when it has not changed for a while.
func (m tmux) settled() string {
	m.t.Helper()
	last, same := m.screen(), 0
	for end := time.Now().Add(patience); same < 8 && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		now := m.screen()
		if same++; now != last {
			last, same = now, 0
		}
	}
	return last
}

// looks is output whose every byte a terminal must get as it is.
const looks = `printf '\033[H\033[2J\033[1;31mred\033[0m \033[38;2;1;200;3m24 bit\033[0m \033[4;7munder\033[m e\314\201 \346\274\242\345\255\227 \033(0lqk\033(B\r\n\033[48;5;20m  x  \033[0K\033[m\r\n\033[10;70Hfar \033[5;10r\033[9;1H\n\n\nend\033[r\033[12;1H'`

func TestSessions(t *testing.T) {
	d := shared
	d.sandbox(t, "sess")
	d.ok(t, "start", "sess")
	t.Run("as without doz", func(t *testing.T) { asWithout(t, d) })
	t.Run("leave and come back", func(t *testing.T) { leaveAndComeBack(t, d) })
	t.Run("killed client", func(t *testing.T) { killedClient(t, d) })
	t.Run("killed host", func(t *testing.T) { killedHost(t, d) })
	t.Run("hibernated", func(t *testing.T) { hibernated(t, d) })
	t.Run("at the command line", func(t *testing.T) { atTheCommandLine(t, d) })
}

// asWithout: what a program draws through attach is what it draws in the terminal
// itself.
func asWithout(t *testing.T, d doz) {
	there, here := d.terminal(t), d.terminal(t)
	here.line("clear; sh -c " + quote(looks+"; read x"))
	there.line("$DOZ run sess --session looks -- sh -c " + quote(looks+"; read x"))
	for _, m := range []tmux{here, there} {
		m.until("end")
	}
	if diff := cmp.Diff(here.settled(), there.settled()); diff != "" {
		t.Errorf("through attach (-without +with):\n%s", diff)
	}
	there.key("Enter")
	there.until("outside>")
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// leaveAndComeBack: after leaving, the terminal is as it was; after coming back, the
// screen is.
func leaveAndComeBack(t *testing.T, d doz) {
	for name, program := range map[string]string{
		"vim":   "vi -c 'set number' -c 'normal 5G' /etc/passwd",
		"less":  "less -N /etc/services",
		"bash":  "bash --norc",
		"mouse": looks + `; printf '\033[?1002;1006;2004h\033[?1h\033=\033[?25l\033]2;named\007'; read x`,
	} {
		t.Run(name, func(t *testing.T) {
			m := d.terminal(t)
			m.line("$DOZ run sess --session " + name + " -e 'PS1=inside> ' -- bash -c " + quote(program))
			if name == "bash" {
				m.until("inside>")
				m.line("seq 30; for i in 1 2 3; do echo -e \"\\e[3${i}mcolour $i\\e[m\"; done")
			}
			m.until(map[string]string{"vim": "root:x:0", "less": "Network services", "bash": "colour 3", "mouse": "end"}[name])
			// Line drawing is the same in both of tmux's ways.
			before := strings.NewReplacer("\x0elqk", "┌─┐", "\x0f", "").Replace(m.settled())
			m.key("C-]")
			m.until("d detach")
			m.key("d")
			m.until("detached; come back with: doz attach sess " + name)
			m.until("outside>")
			for _, state := range []string{"alternate 0", "shown 1", "mouse 00", "keys 0", "keypad 0", "region 0-23"} {
				if out := m.screen(); !strings.Contains(out, state) {
					t.Errorf("after leaving there is no %q in:\n%s", state, out)
				}
			}
			m.line("stty -a | tr ' ' '\\n' | grep -xc -e icanon -e 'echo'")
			m.until("\n2\n")
			m.line("clear; $DOZ attach sess " + name)
			m.untilState(func(now string) bool { return strings.Contains(now, strings.TrimSpace(strings.Split(before, "\n")[0])) })
			if diff := cmp.Diff(before, m.settled()); diff != "" {
				t.Errorf("after coming back (-before +after):\n%s", diff)
			}
			d.ok(t, "sessions", "end", "--yes", "sess", name)
			m.until("outside>")
		})
	}
}

// killedClient: a client that is killed outright leaves a terminal as it was, and the
// session.
func killedClient(t *testing.T, d doz) {
	m := d.terminal(t)
	m.line("echo pid $$; exec 3>&1; $DOZ run sess --session killed -- vi /etc/passwd")
	m.until("root:x:0")
	shell := strings.TrimSpace(m.do("display-message", "-p", "#{pane_pid}"))
	children, err := os.ReadFile("/proc/" + shell + "/task/" + shell + "/children")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.Fields(string(children))[0])
	if err != nil {
		t.Fatal(err)
	}
	syscall.Kill(pid, syscall.SIGKILL)
	// What the shell says before the terminal is given back may be on the screen that
	// goes then.
	m.untilState(func(now string) bool { return strings.Contains(now, "alternate 0") })
	m.line("stty -a | tr ' ' '\\n' | grep -xc -e icanon -e echo")
	m.until("\n2\n")
	if out := d.ok(t, "sessions", "sess", "--screen", "killed"); !strings.Contains(out, "root:x:0") {
		t.Errorf("the session shows:\n%s", out)
	}
	d.ok(t, "sessions", "end", "--yes", "sess", "killed")
}

// killedHost: those who looked come back by themselves through the next host, and no
// session is lost.
func killedHost(t *testing.T, d doz) {
	var all []tmux
	d.ok(t, "run", "sess", "-d", "--session", "through", "--", "bash", "--norc")
	for range 3 {
		m := d.terminal(t)
		m.line("$DOZ attach sess through")
		m.until("bash-5")
		all = append(all, m)
	}
	kill(t, d.host(t))
	all[1].line("echo $((20 + 22))")
	for _, m := range all {
		m.until("42")
	}
	all[2].line("exit 5")
	for _, m := range all {
		m.until("exit code 5")
	}
}

// hibernated: whoever looks waits, and comes back by itself.
func hibernated(t *testing.T, d doz) {
	m := d.terminal(t)
	m.line("$DOZ attach sess; echo code $?")
	m.until("root@sess")
	m.line("echo my pid is $$.")
	m.until("my pid is ")
	_, pid, _ := strings.Cut(m.settled(), "my pid is ")
	_, pid, _ = strings.Cut(pid, "my pid is ")
	pid, _, _ = strings.Cut(pid, ".")
	d.ok(t, "hibernate", "sess")
	m.until("sess is hibernated")
	d.ok(t, "wake", "sess")
	m.untilState(func(now string) bool { return !strings.Contains(now, "is hibernated") })
	m.line(fmt.Sprintf("clear; [ $$ = %s ] && echo still the same; exit 9", pid))
	m.until("code 9")
}

func atTheCommandLine(t *testing.T, d doz) {
	if r := d.run(t, "", "run", "sess", "--", "sh", "-c", "echo out; exit 7"); r.code != 7 || !strings.Contains(r.out, "out") {
		t.Errorf("run: %+v", r)
	}
	if r := d.run(t, "", "run", "sess", "--", "nosuch"); r.code != 125 {
		t.Errorf("no such program: %+v", r)
	}
	if r := d.run(t, "", "attach", "sess", "nosuch"); r.code != 2 {
		t.Errorf("no such session: %+v", r)
	}
	if r := d.run(t, "\x1d", "attach", "sess"); r.code != 0 || !strings.Contains(r.err, "doz attach sess") {
		t.Errorf("Ctrl-] from a pipe: %+v", r)
	}
	d.ok(t, "run", "sess", "-d", "-e", "A=1", "--session", "two", "--user", "nobody", "--workdir", "/tmp", "--", "sh", "-c", "pwd; id -un; echo $A; read x")
	if r := d.run(t, "", "run", "sess", "-d", "--session", "two", "--", "sh"); r.code != 4 {
		t.Errorf("the name is taken: %+v", r)
	}
	var list api.SessionList
	if err := json.Unmarshal([]byte(d.ok(t, "sessions", "sess", "--json")), &list); err != nil || len(list.Sessions) != 2 {
		t.Fatalf("sessions: %+v, %v", list, err)
	}
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		out := d.ok(t, "sessions", "sess", "--screen", "two")
		if out == "/tmp\nnobody\n1\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("session two shows %q", out)
		}
	}
	if r := d.run(t, "", "sessions", "end", "sess", "two"); r.code != 5 {
		t.Errorf("end without a yes: %+v", r)
	}
	if r := d.run(t, "", "sessions", "restart", "--yes", "sess", "two"); r.code != 0 || !strings.Contains(r.err, "variables") {
		t.Errorf("restart: %+v", r)
	}
	d.ok(t, "sessions", "end", "--yes", "sess", "two")
	if r := d.run(t, "", "sessions", "end", "--yes", "sess", "two"); r.code != 2 {
		t.Errorf("ended twice: %+v", r)
	}
	d.ok(t, "up", "sess", "-d")
}

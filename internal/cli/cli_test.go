package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/wire"
)

// The scripts in testdata say what the command line is to do. In them, doz runs
// against a store that is faked here, and whose host is.
//
//	code N doz …   runs doz and expects exit code N
//
// HOST=none in a script's environment is no host, and none that can be started;
// HOST=other is one of another protocol version.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"doz": func() { os.Exit(doz()) }})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": code,
		},
		Setup: func(e *testscript.Env) error {
			// Time zone and columns are the reader's otherwise.
			e.Setenv("TZ", "UTC")
			e.Setenv("GORACE", "atexit_sleep_ms=0")
			// A socket's path must be short; the script's folder is not.
			dir, err := os.MkdirTemp("", "doz")
			if err != nil {
				return err
			}
			e.Defer(func() { os.RemoveAll(dir) })
			e.Setenv("SOCKET", filepath.Join(dir, "host.sock"))
			l, err := listen(filepath.Join(dir, "host.sock"))
			if err != nil {
				return err
			}
			e.Defer(func() { l.Close() })
			other, err := listen(filepath.Join(dir, "host.sock.other"))
			if err != nil {
				return err
			}
			e.Defer(func() { other.Close() })
			return nil
		},
	})
}

// code runs a command that must exit with a number.
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N COMMAND [ARG...]")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := 0
	if err != nil {
		var status interface{ ExitCode() int }
		if !errors.As(err, &status) {
			ts.Fatalf("%s: %v", args[1], err)
		}
		got = status.ExitCode()
	}
	if strconv.Itoa(got) != args[0] {
		ts.Fatalf("exit code %d, want %s", got, args[0])
	}
}

// doz is the command of the scripts.
func doz() int {
	return Main(Deps{
		Version:      "1.2.3",
		DefaultStore: func() (string, error) { return "default", nil },
		Open: func(dir string) (Local, error) {
			if strings.Contains(dir, "bad") {
				return nil, fmt.Errorf("cannot use store %s: it is not a folder", dir)
			}
			return fakeLocal{}, nil
		},
	}, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}

// fakeLocal is a store with two sandboxes and one image.
type fakeLocal struct{}

func (fakeLocal) Socket() string {
	switch os.Getenv("HOST") {
	case "none":
		return "/nonexistent/host.sock"
	case "other":
		return os.Getenv("SOCKET") + ".other"
	}
	return os.Getenv("SOCKET")
}

func (fakeLocal) Spawn() (func() error, error) {
	return nil, errors.New("no host can be started")
}

func (fakeLocal) Serve(context.Context, time.Duration) error { return nil }
func (fakeLocal) Leftovers() bool                            { return false }
func (fakeLocal) List() ([]api.Sandbox, error)               { return sandboxes, nil }

func (fakeLocal) Inspect(name string) (api.Sandbox, error) { return inspect(name) }

func (fakeLocal) Points(string) ([]api.Point, error) { return nil, nil }
func (fakeLocal) Sessions(api.SessionsRequest) (api.SessionList, error) {
	return api.SessionList{}, nil
}
func (fakeLocal) Boots(string) ([]api.Boot, error) {
	return []api.Boot{{Number: 1, Kind: "start", At: noon, Millis: 2500, OK: true}, {Number: 2, Kind: "start", At: noon, Millis: 12000, Problem: "the guest did not answer"}}, nil
}

func (fakeLocal) Boot(_ string, n int) (api.Boot, error) {
	return api.Boot{Number: n, Steps: []api.BootStep{{Name: "kernel", Millis: 300}}, Console: "Linux version 6\x1b[2J\n"}, nil
}

func (fakeLocal) Images() ([]api.Image, error) {
	return []api.Image{{Name: "lab", Key: "0123456789abcdef", Created: noon, Source: "rootfs tar", DiskBytes: 300 << 20, UsedBy: []string{"a1", "b2"}}}, nil
}

func (fakeLocal) Doctor(context.Context) []Check {
	return []Check{{Name: "disk", OK: true, Needed: true, Text: "room enough"}, {Name: "QEMU", OK: os.Getenv("DOCTOR") == "", Needed: os.Getenv("DOCTOR") == "ill", Text: "version 7", Remedy: "apt install qemu"}}
}

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

var sandboxes = []api.Sandbox{
	{Name: "a1", Phase: api.Running, Image: "lab", Network: "none", MemoryBytes: 300 << 20, DiskBytes: 5 << 29, Isolated: true},
	{Name: "b2", Phase: api.Off, Image: "lab", Network: "none", DiskBytes: 196 << 10, DiedWithHost: true},
	{Name: "broken", Phase: api.Damaged, Network: "none", Problem: "the record is damaged"},
}

func inspect(name string) (api.Sandbox, error) {
	for _, v := range sandboxes {
		if v.Name == name {
			return v, nil
		}
	}
	return api.Sandbox{}, &api.Error{Kind: api.KindNotFound, Message: fmt.Sprintf("no sandbox is named %q", name), Hint: "see which there are with: doz ls"}
}

// listen is the fake host.
func listen(socket string) (net.Listener, error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				w := wire.New(conn)
				if line, err := w.ReadLine(); err == nil {
					answer(w, line, strings.HasSuffix(socket, ".other"))
				}
			}()
		}
	}()
	return l, nil
}

// request is a request's fields, whatever its operation.
type request struct {
	api.Request
	Name   string
	create api.CreateRequest
	exec   api.ExecRequest
}

// answer does what the request says. A sandbox named after a kind of error fails with
// it. An other host is of another protocol version.
func answer(w *wire.Conn, line []byte, other bool) {
	var r request
	if err := errors.Join(json.Unmarshal(line, &r.Request), json.Unmarshal(line, &r.create), json.Unmarshal(line, &r.exec)); err != nil {
		w.Reply(nil, err)
		return
	}
	r.Name = r.create.Name
	if kind, ok := strings.CutPrefix(r.Name, "err-"); ok && r.Op != api.OpInspect {
		w.Reply(nil, &api.Error{Kind: api.Kind(kind), Message: "it failed as " + kind, Hint: "do something else"})
		return
	}
	switch r.Op {
	case api.OpPing:
		if other {
			w.Reply(api.Status{Version: "9.1", ProtocolVersion: 9, PID: 4242}, nil)
			return
		}
		w.Reply(api.Status{Version: "1.2.3", ProtocolVersion: 1, Flavour: "cli", PID: 42, Store: "/store", Started: time.Now()}, nil)
	case api.OpList:
		w.Reply(sandboxes, nil)
	case api.OpInspect, api.OpShutdown:
		v, err := inspect(r.Name)
		if strings.HasPrefix(r.Name, "err-") {
			v, err = api.Sandbox{Name: r.Name}, nil
		}
		w.Reply(v, err)
	case api.OpCreate:
		w.WriteJSON(api.Progress{Event: "progress", Step: "copy"})
		w.Reply(api.Sandbox{Name: r.Name, Phase: api.Off, Image: r.create.Image, CPUs: r.create.CPUs, MemoryMiB: r.create.MemoryMiB, DiskGiB: r.create.DiskGiB}, nil)
	case api.OpStart:
		v, err := inspect(r.Name)
		w.Reply(api.StartResult{Sandbox: v, Started: v.Phase == api.Off, BootMillis: 1234}, err)
	case api.OpRemove, api.OpImageRemove:
		w.Reply(struct{}{}, nil)
	case api.OpImageImport:
		w.Reply(api.Image{Name: r.Name, Key: "0123456789abcdef", Source: "OCI layout", DiskBytes: 1 << 20}, nil)
	case api.OpStop:
		w.Reply(api.StopResult{Sandboxes: []api.StopRow{{Name: "a1", Phase: api.Off, Millis: 700}}}, nil)
	case api.OpEvents:
		w.Reply(struct{}{}, nil)
		w.WriteJSON(api.Event{Event: "phase", At: noon, Name: "a1", Phase: api.Running})
	case api.OpConsole:
		w.Reply(struct{}{}, nil)
		w.WriteJSON(api.ConsoleText{Event: "console", Text: "growing\x07\n"})
	case api.OpExec:
		execute(w, r.Name, r.exec)
	}
}

// execute runs one of a few programs.
func execute(w *wire.Conn, name string, r api.ExecRequest) {
	if _, err := inspect(name); err != nil {
		w.Reply(nil, err)
		return
	}
	w.Reply(api.ExecResult{PID: 7, Started: name == "b2", BootMillis: 1234}, nil)
	out := guest.NewFrameWriter(w.Conn)
	say := func(typ byte, text string) { out.Write(typ, []byte(text)) }
	status := guest.ExitStatus{}
	switch r.Argv[0] {
	case "say": // its words, the first to the output and the rest as errors
		say(guest.Stdout, r.Argv[1]+"\n")
		say(guest.Stderr, strings.Join(r.Argv[2:], " ")+"\n")
	case "args":
		data, _ := json.Marshal(r)
		say(guest.Stdout, string(data)+"\n")
	case "cat":
		in := guest.NewFrameReader(w)
		for typ, payload, err := in.Read(); err == nil && typ == guest.Stdin && len(payload) > 0; typ, payload, err = in.Read() {
			say(guest.Stdout, string(payload))
		}
	case "exit":
		status.Code, _ = strconv.Atoi(r.Argv[1])
	case "killed":
		status = guest.ExitStatus{Code: 137, Signal: "KILL"}
	case "slow":
		status = guest.ExitStatus{Code: 137, Signal: "KILL", TimedOut: true}
	case "die": // the host does
		return
	case "hostile":
		out.WriteJSON(guest.Failure, api.Error{Kind: api.KindFailed, Message: "no \x1b[2Jlines\nhere"})
		return
	case "lost":
		out.WriteJSON(guest.Failure, api.Error{Kind: api.KindFailed, Message: "the sandbox ended while the program ran"})
		return
	}
	out.WriteJSON(guest.Exit, status)
}

func TestMebibytes(t *testing.T) {
	for text, want := range map[string]int{
		"": 0, "512": 512, "512M": 512, "512m": 512, "512MiB": 512, "512MB": 512, "2G": 2048, "2g": 2048, "2GiB": 2048, "2gb": 2048,
		"0": -1, "-1": -1, "1.5G": -1, "G": -1, "2T": -1, "2 G": -1, "2GG": -1, "99999999999999999999": -1, "2000000000": -1,
	} {
		got, err := mebibytes("--memory", text)
		if err != nil {
			got = -1
			var e *api.Error
			if !errors.As(err, &e) || e.Kind != api.KindUsage {
				t.Errorf("%q gives %v, want a usage error", text, err)
			}
		}
		if got != want {
			t.Errorf("%q is %d MiB, want %d", text, got, want)
		}
	}
}

func FuzzMebibytes(f *testing.F) {
	for _, seed := range []string{"", "2G", "512MiB", "-1G", "9999999999G"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, err := mebibytes("--memory", text); err == nil && (n < 0 || n > 1<<40) {
			t.Fatalf("%q is %d MiB", text, n)
		}
	})
}

func TestSizesForPeople(t *testing.T) {
	got := map[string]string{}
	for _, n := range []int64{0, 1023, 1 << 20, 1<<30 - 1, 1 << 30, 5 << 29, 10 << 30, 1 << 40} {
		got[fmt.Sprint(n)] = size(n)
	}
	want := map[string]string{
		"0": "0 KiB", "1023": "0 KiB", "1048576": "1 MiB", "1073741823": "1023 MiB", "1073741824": "1.0 GiB",
		"2684354560": "2.5 GiB", "10737418240": "10 GiB", "1099511627776": "1024 GiB",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestHarmless(t *testing.T) {
	if got := harmless("a\x1b[2Jb\r\x07\tc\n\x7f\u009b2J✓"); got != "a[2Jb\tc\n2J✓" {
		t.Errorf("got %q", got)
	}
}

func TestSteps(t *testing.T) {
	progress := []api.Progress{{Step: "unpack", Done: 1, Total: 2, Unit: "bytes"}, {Step: "unpack", Done: 2, Total: 2}, {Step: "seal\x1b[2J"}}
	for name, test := range map[string]struct {
		a    app
		want string
	}{
		"a quick one says nothing": {app{}, ""},
		"unless asked to":          {app{verbose: true}, "import: unpack\nimport: seal[2J\n"},
		"quiet":                    {app{verbose: true, quiet: true}, ""},
		"JSON":                     {app{verbose: true, json: true}, ""},
	} {
		var out strings.Builder
		test.a.err = &out
		s := test.a.steps("import")
		for _, p := range progress {
			s.show(p)
		}
		s.end()
		s.show(api.Progress{Step: "late"})
		if out.String() != test.want {
			t.Errorf("%s: got %q, want %q", name, out.String(), test.want)
		}
	}
	for want, p := range map[string]api.Progress{
		"…": {}, "7": {Done: 7}, "1 MiB": {Done: 1 << 20, Unit: "bytes"},
		strings.Repeat("█", 12) + strings.Repeat("░", 12): {Done: 1, Total: 2},
		strings.Repeat("█", 24) + " 2 MiB of 1 MiB":       {Done: 2 << 20, Total: 1 << 20, Unit: "bytes"},
	} {
		if got := amount(p); got != want {
			t.Errorf("amount(%+v) = %q, want %q", p, got, want)
		}
	}
}

// A signal before the program runs is a reason to leave, and after it the program's.
func TestForward(t *testing.T) {
	received, names, running := make(chan os.Signal), make(chan string), make(chan struct{})
	left := make(chan struct{}, 1)
	go forward(received, names, running, func() { left <- struct{}{} })
	received <- os.Interrupt
	<-left
	close(running)
	received <- os.Interrupt
	if name := <-names; name != "INT" {
		t.Errorf("the program was sent %s", name)
	}
	close(received)
}

// A full disk is a failure, and no mistake in typing.
func TestOutputThatCannotBeWritten(t *testing.T) {
	t.Setenv("HOST", "none")
	deps := Deps{DefaultStore: func() (string, error) { return "", nil }, Open: func(string) (Local, error) { return fakeLocal{}, nil }}
	for _, args := range [][]string{{"ls"}, {"ls", "--json"}, {"inspect", "a1"}, {"console", "a1"}, {"doctor"}} {
		var errs strings.Builder
		if got := Main(deps, args, strings.NewReader(""), fullDisk{}, &errs); got != 1 {
			t.Errorf("doz %s: exit code %d, want 1", strings.Join(args, " "), got)
		}
		if !slices.Contains(args, "--json") && errs.String() != "doz: cannot write the output: the disk is full\n" {
			t.Errorf("doz %s says %q", strings.Join(args, " "), errs.String())
		}
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("the disk is full") }

func TestAnyErrorHasAnExitCode(t *testing.T) {
	for err, want := range map[error]int{
		nil: 0, exitCode(9): 9, context.Canceled: 130, errors.New("unknown flag"): 64,
		&api.Error{Kind: "of a later version"}: 1,
	} {
		a := app{out: io.Discard, err: io.Discard}
		if got := a.report(err); got != want {
			t.Errorf("%v gives %d, want %d", err, got, want)
		}
	}
}

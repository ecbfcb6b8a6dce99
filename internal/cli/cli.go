// Package cli is doz's command line: it parses, calls the host through package
// client, and prints.
//
// It must not hold logic of its own: what a command means is decided in the host.
// One file a command or a family of them.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
)

// Deps is what the program gives its command line.
type Deps struct {
	Version      string
	DefaultStore func() (string, error)
	// Open checks the store at dir and gives what is done without a host.
	Open func(dir string) (Local, error)
}

// Local is a store as this process sees it.
type Local interface {
	Socket() string
	// Spawn starts a detached host; the function it gives says why that ended.
	Spawn() (ended func() error, err error)
	// Serve is a host's whole life.
	Serve(ctx context.Context, idle time.Duration) error
	List() ([]api.Sandbox, error)
	Inspect(name string) (api.Sandbox, error)
	Points(name string) ([]api.Point, error)
	Sessions(r api.SessionsRequest) (api.SessionList, error) // as they were saved
	Boots(name string) ([]api.Boot, error)
	Boot(name string, number int) (api.Boot, error)
	Images() ([]api.Image, error)
	Doctor(ctx context.Context) []Check
	// Leftovers says whether a host died and left something to recover.
	Leftovers() bool
}

// Check is one line of doctor.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Needed bool   `json:"needed"` // false: a warning
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
}

// Exit codes.
const (
	exitUsage = 64
	exitOurs  = 125
)

var exitCodes = map[api.Kind]int{
	api.KindFailed: 1, api.KindNotFound: 2, api.KindPhase: 3, api.KindExists: 4, api.KindUnconfirmed: 5,
	api.KindUnavailable: 6, api.KindVersion: 6, api.KindNotBuilt: 7, api.KindUsage: exitUsage, api.KindExec: exitOurs,
}

// exitCode is a program's own code on its way out through main.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// app is one run of the command line.
type app struct {
	deps Deps
	in   io.Reader
	out  io.Writer
	err  io.Writer

	started  bool // a command has begun: what fails from here on is no mistake in typing
	store    string
	json     bool
	verbose  bool
	quiet    bool
	progress string
	running  string // the command, for what errors of exec mean
}

// Main runs a command and gives the process's exit code.
func Main(deps Deps, args []string, in io.Reader, out, errw io.Writer) int {
	written := &output{w: out}
	a := &app{deps: deps, in: in, out: written, err: errw}
	// exec takes these signals itself.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if cmd != nil {
		a.running = cmd.Name()
	}
	if !a.started {
		a.json = a.json || wantsJSON(args)
	}
	if written.failed != nil {
		err = &api.Error{Kind: api.KindFailed, Message: "cannot write the output: " + written.failed.Error()}
	}
	return a.report(err)
}

// output remembers the first failure to write, so that none is passed over.
type output struct {
	w      io.Writer
	failed error
}

func (o *output) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	if err != nil && o.failed == nil {
		o.failed = err
	}
	return n, err
}

// wantsJSON looks for --json in what could not be parsed.
func wantsJSON(args []string) bool {
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.Contains(args, "--json")
}

// report prints an error in the form asked for and gives its exit code.
func (a *app) report(err error) int {
	if err == nil {
		return 0
	}
	var code exitCode
	if errors.As(err, &code) {
		return int(code)
	}
	if errors.Is(err, context.Canceled) {
		return 130
	}
	var e *api.Error
	switch {
	case errors.As(err, &e):
	case a.started:
		e = api.AsError(err)
	default:
		// cobra's, about the command line.
		e = &api.Error{Kind: api.KindUsage, Message: err.Error(), Hint: "see: doz help"}
	}
	if a.json {
		json.NewEncoder(a.out).Encode(map[string]any{"error": e})
	} else {
		// The words may be a guest's.
		fmt.Fprintln(a.err, "doz:", oneLine(e.Message))
		if e.Hint != "" {
			fmt.Fprintln(a.err, "    ", oneLine(e.Hint))
		}
	}
	exit, known := exitCodes[e.Kind]
	if !known {
		exit = 1
	}
	if slices.Contains([]string{"exec", "run", "attach", "up"}, a.running) && e.Kind != api.KindExists && e.Kind != api.KindUsage && e.Kind != api.KindNotFound && e.Kind != api.KindPhase {
		exit = exitOurs
	}
	return exit
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "doz",
		Short: "Linux sandboxes on your own computer, each a real virtual machine",
		Long: `doz runs Linux sandboxes on your own computer, each a real virtual machine with
its own kernel.

  doz create a1              make a sandbox from the image lab
  doz exec a1 -- uname -a    run a program in it (starts it first)
  doz ls                     see what there is
  doz rm a1                  remove it`,
		Version: a.deps.Version, SilenceErrors: true, SilenceUsage: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: false},
	}
	root.SetVersionTemplate("doz {{.Version}}\n")
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	flags := root.PersistentFlags()
	flags.StringVar(&a.store, "store", "", "store folder (default $DOZ_STORE, or doz in the user's data folder)")
	flags.BoolVar(&a.json, "json", false, "print JSON")
	flags.BoolVarP(&a.verbose, "verbose", "v", false, "show every step")
	flags.BoolVarP(&a.quiet, "quiet", "q", false, "show no steps")
	flags.StringVar(&a.progress, "progress", "auto", "auto or plain: one line a step")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		a.started = true
		if a.progress != "auto" && a.progress != "plain" {
			return &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("--progress: %q is neither auto nor plain", a.progress)}
		}
		return nil
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return &api.Error{Kind: api.KindUsage, Message: err.Error(), Hint: "see: " + cmd.CommandPath() + " --help"}
	})
	root.AddCommand(a.create(), a.start(), a.exec(), a.attach(), a.run(), a.up(), a.sessions(), a.guardTerminal(), a.ls(), a.inspect(),
		a.pause(), a.resume(), a.sleep(), a.hibernate(), a.wake(),
		a.fork(), a.duplicate(), a.point(), a.template(), a.shutdown(), a.reset(), a.rm(),
		a.console(), a.events(), a.image(), a.host(), a.doctor())
	return root
}

// name refuses what can be no name, before a host is bothered with it.
func name(s string) error {
	if !api.ValidName(s) {
		return &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("%q is no name: 1 to 40 of a-z, 0-9 and -", s)}
	}
	return nil
}

// completeSandbox and completeImage offer the names in the store for a command's
// first argument. They start no host.
func (a *app) completeSandbox(_ *cobra.Command, typed []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	if l, err := a.local(); err == nil && len(typed) == 0 {
		list, _ := l.List()
		for _, v := range list {
			names = append(names, v.Name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeImage(_ *cobra.Command, typed []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	if l, err := a.local(); err == nil && len(typed) == 0 {
		list, _ := l.Images()
		for _, v := range list {
			names = append(names, v.Name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// args is a check of a command's arguments in our own words.
func args(least, most int, usage string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, got []string) error {
		if len(got) >= least && (len(got) <= most || most < 0) {
			return nil
		}
		what := "too few arguments"
		if len(got) > least {
			what = "too many arguments"
		}
		return &api.Error{Kind: api.KindUsage, Message: what, Hint: "usage: doz " + usage}
	}
}

// local opens the store.
func (a *app) local() (Local, error) {
	dir := a.store
	if dir == "" {
		var err error
		if dir, err = a.deps.DefaultStore(); err != nil {
			return nil, &api.Error{Kind: api.KindFailed, Message: err.Error()}
		}
	}
	l, err := a.deps.Open(dir)
	if err != nil {
		return nil, api.AsError(err)
	}
	return l, nil
}

// connect finds the host or starts one.
func (a *app) connect(ctx context.Context, progress func(api.Progress)) (*client.Client, error) {
	l, err := a.local()
	if err != nil {
		return nil, err
	}
	c := client.New(l.Socket(), progress)
	status, err := c.Connect(ctx, l.Spawn)
	if err != nil {
		return nil, err
	}
	if status.Version != a.deps.Version && !a.quiet {
		fmt.Fprintf(a.err, "doz: note: the host is doz %s and this is %s; doz host stop lets the next command start this one's\n", status.Version, a.deps.Version)
	}
	return c, nil
}

// reader gives a client of the host that runs already, or nil and the store. What a
// dead host left is recovered by a new one first.
func (a *app) reader(ctx context.Context) (*client.Client, Local, error) {
	l, err := a.local()
	if err != nil {
		return nil, nil, err
	}
	c := client.New(l.Socket(), nil)
	_, err = c.Ping(ctx)
	if errors.Is(err, client.ErrNoHost) && l.Leftovers() {
		_, err = c.Connect(ctx, l.Spawn)
	}
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	if err != nil {
		return nil, l, nil
	}
	return c, l, nil
}

// print prints v as JSON when that was asked for, and otherwise lets text print.
func (a *app) print(v any, text func()) error {
	if a.json {
		return a.document(v)
	}
	text()
	return nil
}

// document prints v as JSON.
func (a *app) document(v any) error {
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// notes tells what the user should know besides.
func (a *app) notes(notes []string) {
	for _, note := range notes {
		fmt.Fprintln(a.err, "doz: note:", oneLine(note))
	}
}

// confirm asks on a terminal. Without one, or a no, it is an error.
func (a *app) confirm(yes bool, question string) error {
	if yes {
		return nil
	}
	f, ok := a.in.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || a.json {
		return &api.Error{Kind: api.KindUnconfirmed, Message: "not confirmed: " + question, Hint: "say yes with --yes"}
	}
	fmt.Fprintf(a.err, "%s [y/N] ", question)
	var answer string
	fmt.Fscanln(f, &answer)
	if s := strings.ToLower(answer); s != "y" && s != "yes" {
		return &api.Error{Kind: api.KindUnconfirmed, Message: "not confirmed"}
	}
	return nil
}

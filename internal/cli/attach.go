package cli

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
)

func (a *app) attach() *cobra.Command {
	var detachKey string
	var noWake bool
	cmd := &cobra.Command{
		Use: "attach NAME [SESSION]", Short: "Show a session of a sandbox and type in it",
		Long: `Show a session of a sandbox and type in it. The sandbox is started or woken first.
Without SESSION it is shell, opened when it does not run. Ctrl-] opens a menu of one
line; pressed again it leaves, and the session goes on. When the session's program ends
its exit code is doz's.`,
		Example: "  doz attach a1\n  doz attach a1 build --detach-key ctrl-q",
		Args:    args(1, 2, "attach NAME [SESSION]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			r := api.AttachRequest{Name: words[0]}
			if len(words) == 2 {
				r.Session = words[1]
			}
			return a.runAttach(cmd.Context(), r, detachKey, noWake)
		},
	}
	cmd.Flags().StringVar(&detachKey, "detach-key", "", "key that leaves at once, as in ctrl-x, in place of Ctrl-] and its menu; none takes no key")
	cmd.Flags().BoolVar(&noWake, "no-wake", false, "wait until somebody else wakes the sandbox")
	return cmd
}

func (a *app) runAttach(ctx context.Context, r api.AttachRequest, detachKey string, noWake bool) error {
	v := &viewing{a: a, sandbox: r.Name, session: r.Session}
	if err := names(r.Name, r.Session); err != nil {
		return err
	}
	if err := v.detachKey(detachKey); err != nil {
		return err
	}
	return v.run(ctx, func(ctx context.Context, c *client.Client, cols, rows int) (*client.Viewer, api.AttachResult, error) {
		r.Cols, r.Rows = cols, rows
		r.NoWake = noWake
		for {
			shown, result, err := c.Attach(ctx, r)
			if err == nil || !noWake || api.AsError(err).Kind != api.KindPhase {
				return shown, result, err
			}
			if end := v.wait(ctx, nil); end != nil && end.left {
				return nil, result, context.Canceled
			} else if end != nil {
				return nil, result, end.err
			}
		}
	})
}

// names refuses what can be no name of a sandbox, or of a session unless it is empty.
func names(sandbox, session string) error {
	if err := name(sandbox); err != nil || session == "" {
		return err
	}
	return name(session)
}

func (a *app) run() *cobra.Command {
	r := api.RunRequest{}
	var env []string
	var detachKey string
	cmd := &cobra.Command{
		Use: "run NAME -- PROGRAM [ARG...]", Short: "Run a program in a new session of a sandbox",
		Long: `Run a program with a terminal of its own, in a new session of a sandbox, and show it.
The sandbox is started or woken first. No shell is involved. Leaving, by Ctrl-] twice or
by a lost connection, does not end the program; its exit code is doz's.`,
		Example: "  doz run a1 -- vim notes\n  doz run a1 -d --session build -- make -j4",
		Args:    args(2, -1, "run NAME -- PROGRAM [ARG...]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) (err error) {
			r.Name, r.Argv = words[0], words[1:]
			if r.Env, err = variables(env); err != nil {
				return err
			}
			return a.runRun(cmd.Context(), r, detachKey)
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.Session, "session", "", "the session's name (default the program's)")
	f.BoolVarP(&r.Detach, "detach", "d", false, "do not show it")
	f.StringArrayVarP(&env, "env", "e", nil, "set a variable, NAME=value (or NAME, for its value here)")
	f.StringVar(&r.User, "user", "", "user to run as: name or number, with :group if wanted (default root)")
	f.StringVar(&r.Workdir, "workdir", "", "folder to run in (default the user's home)")
	f.BoolVar(&r.NoStart, "no-start", false, "fail when the sandbox is off")
	f.BoolVar(&r.NoWake, "no-wake", false, "fail when the sandbox is paused, asleep or hibernated")
	f.StringVar(&detachKey, "detach-key", "", "as for attach")
	return cmd
}

// variables reads -e's.
func variables(env []string) (map[string]string, error) {
	set := map[string]string{}
	for _, pair := range env {
		key, value, found := strings.Cut(pair, "=")
		if key == "" {
			return nil, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("-e: %q names no variable; write NAME=value", pair)}
		}
		if !found {
			if value, found = os.LookupEnv(key); !found {
				continue
			}
		}
		set[key] = value
	}
	return set, nil
}

func (a *app) runRun(ctx context.Context, r api.RunRequest, detachKey string) error {
	if err := names(r.Name, r.Session); err != nil {
		return err
	}
	v := &viewing{a: a, sandbox: r.Name}
	if err := v.detachKey(detachKey); err != nil {
		return err
	}
	if !r.Detach {
		return v.run(ctx, func(ctx context.Context, c *client.Client, cols, rows int) (*client.Viewer, api.AttachResult, error) {
			r.Cols, r.Rows = cols, rows
			return c.Run(ctx, r)
		})
	}
	steps := a.steps("start " + r.Name)
	defer steps.end()
	c, err := a.connect(ctx, steps.show)
	if err != nil {
		return err
	}
	result, err := c.RunDetached(ctx, r)
	if err != nil {
		return err
	}
	steps.end()
	return a.print(result, func() {
		a.notes(result.Notes)
		fmt.Fprintf(a.out, "%s/%s: running; show it with: doz attach %s %s\n", r.Name, result.Session.Session, r.Name, result.Session.Session)
	})
}

func (a *app) up() *cobra.Command {
	var o createOptions
	r := api.RunRequest{}
	cmd := &cobra.Command{
		Use: "up NAME [-- PROGRAM [ARG...]]", Short: "Make a sandbox if it is not there, start it, and show a session",
		Long: `Make a sandbox if it is not there, start or wake it, and show its shell, or a new session
that runs PROGRAM. The options of create count only when the sandbox is made.`,
		Example: "  doz up a1\n  doz up a2 --memory 4G -d\n  doz up a1 -- top",
		Args:    args(1, -1, "up NAME [-- PROGRAM [ARG...]]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			r.Name, r.Argv = words[0], words[1:]
			if err := names(r.Name, r.Session); err != nil {
				return err
			}
			given := 0
			for _, flag := range createFlags {
				if cmd.Flags().Changed(flag) {
					given++
				}
			}
			return a.runUp(cmd.Context(), r, o, given > 0)
		},
	}
	a.createOptions(cmd, &o)
	cmd.Flags().StringVar(&r.Session, "session", "", "the session's name (default shell, or the program's)")
	cmd.Flags().BoolVarP(&r.Detach, "detach", "d", false, "show nothing")
	return cmd
}

func (a *app) runUp(ctx context.Context, r api.RunRequest, o createOptions, options bool) error {
	create, err := o.request(r.Name)
	if err != nil {
		return err
	}
	steps := a.steps("create " + r.Name)
	defer steps.end()
	c, err := a.connect(ctx, steps.show)
	if err != nil {
		return err
	}
	switch _, err := c.Inspect(ctx, r.Name); {
	case err == nil && options && !a.quiet:
		fmt.Fprintf(a.err, "doz: note: sandbox %q is there already; the options to make it count for nothing\n", r.Name)
	case err == nil:
	case api.AsError(err).Kind != api.KindNotFound:
		return err
	default:
		// Another may make it at the same time: it is there then, as wanted.
		if _, err := c.Create(ctx, create); err != nil && api.AsError(err).Kind != api.KindExists {
			return err
		}
	}
	steps.end()
	switch {
	case len(r.Argv) > 0:
		return a.runRun(ctx, r, "")
	case !r.Detach:
		return a.runAttach(ctx, api.AttachRequest{Name: r.Name, Session: r.Session}, "", false)
	}
	started, err := c.Start(ctx, r.Name)
	if err != nil {
		return err
	}
	return a.print(started, func() {
		a.notes(started.Notes)
		fmt.Fprintf(a.out, "%s: %s\n", r.Name, started.Sandbox.Phase)
	})
}

func (a *app) sessions() *cobra.Command {
	r := api.SessionsRequest{}
	var vt bool
	cmd := &cobra.Command{
		Use: "sessions NAME", Short: "List a sandbox's sessions, or print what one shows",
		Example: "  doz sessions a1\n  doz sessions a1 --screen shell",
		Args:    args(1, 1, "sessions NAME [--screen SESSION]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			r.Name = words[0]
			if err := names(r.Name, r.Screen); err != nil {
				return err
			}
			return a.runSessions(cmd.Context(), r, vt)
		},
	}
	cmd.Flags().StringVar(&r.Screen, "screen", "", "print what this session shows, as text")
	cmd.Flags().BoolVar(&vt, "vt", false, "with --screen: the bytes that draw it on a terminal; never printed to one")
	cmd.AddCommand(a.sessionEnd(), a.sessionRestart())
	return cmd
}

func (a *app) runSessions(ctx context.Context, r api.SessionsRequest, vt bool) error {
	if vt && a.screen() != nil {
		return &api.Error{Kind: api.KindUsage, Message: "--vt does not print to a terminal", Hint: "write it to a file, or show the session with: doz attach " + r.Name}
	}
	c, err := a.connect(ctx, nil)
	if err != nil {
		return err
	}
	list, err := c.Sessions(ctx, r)
	if err != nil {
		return err
	}
	return a.print(list, func() {
		switch {
		case list.Screen != nil && vt:
			a.out.Write(list.Screen.VT)
		case list.Screen != nil:
			fmt.Fprint(a.out, list.Screen.Text)
		default:
			a.sessionTable(r.Name, list.Sessions)
		}
	})
}

func (a *app) sessionTable(sandbox string, list []api.Session) {
	if len(list) == 0 {
		fmt.Fprintln(a.err, "no sessions; open one with: doz attach", sandbox)
		return
	}
	t := newTable(a.out, "SESSION", "PID", "SIZE", "CLIENTS", "STATE", "AGE", "COMMAND")
	for _, s := range list {
		pid, state := fmt.Sprint(s.PID), string(s.State)
		if s.ExitCode != nil {
			pid, state = "-", fmt.Sprintf("ended, %d", *s.ExitCode)
		}
		t.row(s.Session, pid, fmt.Sprintf("%d×%d", s.Cols, s.Rows), fmt.Sprint(s.Clients), state,
			time.Since(s.Started).Round(time.Second).String(), oneLine(strings.Join(s.Argv, " ")))
	}
	t.flush()
}

func (a *app) sessionEnd() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "end NAME SESSION", Short: "End a session's program",
		Args: args(2, 2, "sessions end NAME SESSION [--yes]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			c, err := a.agreedSession(cmd.Context(), words, yes, "end")
			if err != nil {
				return err
			}
			s, err := c.EndSession(cmd.Context(), api.SessionRequest{Name: words[0], Session: words[1]})
			if err != nil {
				return err
			}
			return a.print(s, func() { fmt.Fprintf(a.out, "%s/%s: ended\n", words[0], words[1]) })
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

func (a *app) sessionRestart() *cobra.Command {
	var yes, fresh, detach, show bool
	cmd := &cobra.Command{
		Use: "restart NAME SESSION", Short: "End a session's program and run it again",
		Args: args(2, 2, "sessions restart NAME SESSION [--yes]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			c, err := a.agreedSession(cmd.Context(), words, yes, "restart")
			if err != nil {
				return err
			}
			s, err := c.RestartSession(cmd.Context(), api.SessionRequest{Name: words[0], Session: words[1], Fresh: fresh})
			if err != nil {
				return err
			}
			if s.EnvDropped {
				a.notes([]string{"the variables it was run with are not kept"})
			}
			if !a.json && !detach && (show || a.screen() != nil) {
				return a.runAttach(cmd.Context(), api.AttachRequest{Name: words[0], Session: words[1]}, "", false)
			}
			return a.print(s, func() { fmt.Fprintf(a.out, "%s/%s: running\n", words[0], words[1]) })
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&yes, "yes", "y", false, "do not ask")
	f.BoolVar(&fresh, "fresh", false, "begin a new conversation, where the program has one")
	f.BoolVarP(&detach, "detach", "d", false, "do not show it")
	f.BoolVar(&show, "attach", false, "show it, also where there is no terminal")
	return cmd
}

// agreedSession connects, finds the session and then asks about it.
func (a *app) agreedSession(ctx context.Context, words []string, yes bool, what string) (*client.Client, error) {
	if err := names(words[0], words[1]); err != nil {
		return nil, err
	}
	c, err := a.connect(ctx, nil)
	if err != nil {
		return nil, err
	}
	list, err := c.Sessions(ctx, api.SessionsRequest{Name: words[0]})
	if err != nil {
		return nil, err
	}
	for _, s := range list.Sessions {
		if s.Session == words[1] {
			return c, a.confirm(yes, fmt.Sprintf("%s session %q of sandbox %q (%s), and end what runs in it?", what, s.Session, words[0], oneLine(strings.Join(s.Argv, " "))))
		}
	}
	return nil, &api.Error{Kind: api.KindNotFound, Message: fmt.Sprintf("sandbox %q has no session %q", words[0], words[1]), Hint: "see which there are with: doz sessions " + words[0]}
}

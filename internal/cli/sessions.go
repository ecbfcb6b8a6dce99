package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
)

func (a *app) sessions() *cobra.Command {
	r := api.SessionsRequest{}
	var vt bool
	cmd := &cobra.Command{
		Use: "sessions NAME [--screen SESSION]", Short: "List a sandbox's sessions, or print what one shows",
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
	c, l, err := a.reader(ctx)
	if err != nil {
		return err
	}
	var list api.SessionList
	if c != nil {
		list, err = c.Sessions(ctx, r)
	} else {
		list, err = l.Sessions(r)
	}
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

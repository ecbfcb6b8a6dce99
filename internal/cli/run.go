package cli

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
)

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

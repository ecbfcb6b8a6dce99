package cli

import (
	"context"

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
			if err := v.begin(); err != nil {
				return nil, result, err
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

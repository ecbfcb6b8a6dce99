package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
)

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

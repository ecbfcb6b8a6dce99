package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
)

// The commands that bring a sandbox to rest, or out of it. None asks: none loses
// anything.

func (a *app) pause() *cobra.Command {
	return a.rest("pause", "Stop a running sandbox where it is; resume goes on", []string{"suspend"}, (*client.Client).Pause)
}

func (a *app) resume() *cobra.Command {
	return a.rest("resume", "Let a paused sandbox go on", nil, (*client.Client).Resume)
}

func (a *app) sleep() *cobra.Command {
	return a.rest("sleep", "Save a sandbox and keep its memory, to be woken in an instant", nil, (*client.Client).Sleep)
}

func (a *app) hibernate() *cobra.Command {
	return a.rest("hibernate", "Save a sandbox to disk and give its memory back", nil, (*client.Client).Hibernate)
}

// rest is a command that does one thing to a sandbox and says how long it took.
func (a *app) rest(use, short string, aliases []string, do func(*client.Client, context.Context, string) (api.Transition, error)) *cobra.Command {
	return &cobra.Command{
		Use: use + " NAME", Aliases: aliases, Short: short,
		Args: args(1, 1, use+" NAME"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := name(names[0]); err != nil {
				return err
			}
			steps := a.steps(use + " " + names[0])
			defer steps.end()
			c, err := a.connect(cmd.Context(), steps.show)
			if err != nil {
				return err
			}
			t, err := do(c, cmd.Context(), names[0])
			if err != nil {
				return err
			}
			steps.end()
			return a.print(t, func() {
				a.notes(t.Notes)
				fmt.Fprintf(a.out, "%s: %s after %s%s\n", t.Sandbox.Name, t.Sandbox.Phase, precise(t.Millis), onDisk(t.Sandbox.Snapshot))
			})
		},
	}
}

// onDisk says what a snapshot takes; nothing where there is none.
func onDisk(s *api.Snapshot) string {
	if s == nil {
		return ""
	}
	return fmt.Sprintf(", %s on disk", size(s.Bytes))
}

// precise is a short duration for people.
func precise(millis float64) string {
	if millis < 100 {
		return fmt.Sprintf("%.1f ms", millis)
	}
	return seconds(int64(millis))
}

func (a *app) wake() *cobra.Command {
	return a.rise("wake", "Have a sleeping or hibernated sandbox go on", nil, (*client.Client).Wake)
}

func (a *app) start() *cobra.Command {
	return a.rise("start", "Start a sandbox, or wake it", []string{"cold-boot"}, (*client.Client).Start)
}

// rise is a command that has a sandbox run.
func (a *app) rise(use, short string, aliases []string, do func(*client.Client, context.Context, string) (api.StartResult, error)) *cobra.Command {
	return &cobra.Command{
		Use: use + " NAME", Aliases: aliases, Short: short,
		Args: args(1, 1, use+" NAME"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := name(names[0]); err != nil {
				return err
			}
			steps := a.steps(use + " " + names[0])
			defer steps.end()
			c, err := a.connect(cmd.Context(), steps.show)
			if err != nil {
				return err
			}
			r, err := do(c, cmd.Context(), names[0])
			if err != nil {
				return err
			}
			steps.end()
			return a.print(r, func() {
				a.notes(r.Notes)
				if !r.Started && !r.Woke {
					fmt.Fprintf(a.out, "%s: running already\n", r.Sandbox.Name)
					return
				}
				fmt.Fprintf(a.out, "%s: running after %s\n", r.Sandbox.Name, seconds(r.BootMillis))
			})
		},
	}
}

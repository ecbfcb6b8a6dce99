package cli

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
)

func (a *app) host() *cobra.Command {
	cmd := &cobra.Command{
		Use: "host", Short: "Look after the background process that owns the machines",
		Long: `The host is the one background process of a store. The first command that needs it
starts it, and it ends by itself when nothing has run for a while.`,
		Args: args(0, 0, "host start|stop|status"),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.hostStart(), a.hostStop(), a.hostStatus(), a.hostServe())
	return cmd
}

func (a *app) hostStart() *cobra.Command {
	return &cobra.Command{
		Use: "start", Short: "Start the host, or find the one that runs", Args: args(0, 0, "host start"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := a.local()
			if err != nil {
				return err
			}
			status, err := client.New(l.Socket(), nil).Connect(cmd.Context(), l.Spawn)
			if err != nil {
				return err
			}
			return a.print(status, func() { a.status(status) })
		},
	}
}

func (a *app) hostStatus() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say whether the host runs; starts none", Args: args(0, 0, "host status"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := a.local()
			if err != nil {
				return err
			}
			status, err := client.New(l.Socket(), nil).Ping(cmd.Context())
			if err != nil {
				return err
			}
			return a.print(status, func() { a.status(status) })
		},
	}
}

func (a *app) status(s api.Status) {
	fmt.Fprintf(a.out, "host of %s\n  doz %s, %s, protocol %d, pid %d, up %s\n  %d running, %d connected\n",
		s.Store, s.Version, s.Flavour, s.ProtocolVersion, s.PID, time.Since(s.Started).Round(time.Second), s.Running, s.Clients)
}

func (a *app) hostStop() *cobra.Command {
	return &cobra.Command{
		Use: "stop", Short: "Hibernate every running sandbox and end the host", Args: args(0, 0, "host stop"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := a.local()
			if err != nil {
				return err
			}
			c := client.New(l.Socket(), nil)
			_, err = c.Ping(cmd.Context())
			if errors.Is(err, client.ErrNoHost) {
				if !l.Leftovers() {
					return a.print(api.StopResult{Sandboxes: []api.StopRow{}}, func() { fmt.Fprintln(a.out, "no host runs") })
				}
				// A host that died left machines: another has to bring them to rest.
				_, err = c.Connect(cmd.Context(), l.Spawn)
			}
			if err != nil {
				return err
			}
			began := time.Now()
			r, err := c.Stop(cmd.Context())
			if err != nil {
				return err
			}
			return a.print(r, func() {
				for _, row := range r.Sandboxes {
					line := fmt.Sprintf("%s: %s after %s", row.Name, row.Phase, seconds(row.Millis))
					if row.Bytes > 0 {
						line += fmt.Sprintf(", %s on disk", size(row.Bytes))
					}
					if row.Problem != "" {
						line += "; " + oneLine(row.Problem)
					}
					fmt.Fprintln(a.out, line)
				}
				fmt.Fprintf(a.out, "host stopped, %s, %s\n", count(len(r.Sandboxes), "sandbox", "sandboxes"), seconds(time.Since(began).Milliseconds()))
			})
		},
	}
}

// hostServe is the host itself.
func (a *app) hostServe() *cobra.Command {
	var idle float64
	cmd := &cobra.Command{
		Use: "serve", Short: "Be the host, in the foreground", Args: args(0, 0, "host serve"), Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := a.local()
			if err != nil {
				return err
			}
			if !(idle >= 0 && idle <= 1e6) { // not a number either
				return &api.Error{Kind: api.KindUsage, Message: "--idle-timeout must be minutes, or 0 for never"}
			}
			err = l.Serve(cmd.Context(), time.Duration(idle*float64(time.Minute)))
			var known *api.Error
			if err != nil && !errors.As(err, &known) {
				err = &api.Error{Kind: api.KindUnavailable, Message: err.Error()}
			}
			return err
		},
	}
	cmd.Flags().Float64Var(&idle, "idle-timeout", 5, "minutes after which a host with nothing to do ends; 0 is never")
	return cmd
}

func (a *app) doctor() *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Check what doz needs of this computer", Args: args(0, 0, "doctor"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := a.local()
			if err != nil {
				return err
			}
			checks := l.Doctor(cmd.Context())
			err = a.print(checks, func() {
				for _, c := range checks {
					mark := "✓"
					if !c.OK && c.Needed {
						mark = "✗"
					} else if !c.OK {
						mark = "!"
					}
					fmt.Fprintf(a.out, "%s %s: %s\n", mark, c.Name, c.Text)
					if c.Remedy != "" {
						fmt.Fprintf(a.out, "    %s\n", c.Remedy)
					}
				}
			})
			if err != nil {
				return err
			}
			for _, c := range checks {
				if !c.OK && c.Needed {
					return exitCode(1)
				}
			}
			return nil
		},
	}
}

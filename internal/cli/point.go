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

func (a *app) point() *cobra.Command {
	cmd := &cobra.Command{
		Use: "point", Short: "Keep a sandbox as it is, and go back to that",
		Long: `A restore point keeps a sandbox's disk as it is now and, with --memory, its running
programs too. POINT is a point's name, its id, or a beginning of either that is no other's.`,
		Args: args(0, 0, "point take|ls|revert|fork|rm"),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.pointTake(), a.pointLs(), a.pointRevert(), a.pointFork(), a.pointRm())
	return cmd
}

func (a *app) pointTake() *cobra.Command {
	var r api.PointTakeRequest
	cmd := &cobra.Command{
		Use: "take NAME [POINT]", Short: "Take a restore point",
		Args: args(1, 2, "point take NAME [POINT] [--note TEXT] [--memory]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			if r.Name = words[0]; len(words) > 1 {
				r.Point = words[1]
			}
			if err := name(r.Name); err != nil {
				return err
			}
			c, err := a.connect(cmd.Context(), nil)
			if err != nil {
				return err
			}
			result, err := c.TakePoint(cmd.Context(), r)
			if err != nil {
				return err
			}
			return a.print(result, func() {
				a.notes(result.Notes)
				fmt.Fprintf(a.out, "%s: kept as %s after %s\n", r.Name, title(result.Point), precise(result.Millis))
			})
		},
	}
	cmd.Flags().StringVar(&r.Note, "note", "", "what to remember of it")
	cmd.Flags().BoolVar(&r.Memory, "memory", false, "keep the running programs too")
	return cmd
}

// title names a point for people.
func title(p api.Point) string { return strings.TrimSpace(p.ID + " " + p.Name) }

func (a *app) pointLs() *cobra.Command {
	return &cobra.Command{
		Use: "ls NAME", Short: "List a sandbox's restore points",
		Args: args(1, 1, "point ls NAME"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			if err := name(words[0]); err != nil {
				return err
			}
			l, err := a.local()
			if err != nil {
				return err
			}
			points, err := l.Points(words[0])
			if err != nil {
				return err
			}
			return a.print(points, func() {
				table := newTable(a.out, "ID", "NAME", "TAKEN", "HOLDS", "DISK", "NOTE")
				for _, p := range points {
					holds := "disk"
					if p.Memory {
						holds = "disk, memory"
					}
					table.row(p.ID, oneLine(p.Name), p.Created.Local().Format(time.DateTime), holds, size(p.Bytes), oneLine(p.Note))
				}
				table.flush()
			})
		},
	}
}

func (a *app) pointRevert() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "revert NAME POINT", Short: "Put a sandbox back to a restore point; it is kept as it is now first",
		Args: args(2, 2, "point revert NAME POINT [--yes]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			r := api.PointRequest{Name: words[0], Point: words[1]}
			c, _, err := a.agreedPoint(cmd.Context(), r, yes, "end the programs of sandbox %q and put it back to %s?")
			if err != nil {
				return err
			}
			result, err := c.Revert(cmd.Context(), r)
			if err != nil {
				return err
			}
			return a.print(result, func() {
				a.notes(result.Notes)
				fmt.Fprintf(a.out, "%s: %s; as it was before it is %s\n", r.Name, result.Sandbox.Phase, title(result.Point))
			})
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

// agreedPoint connects, finds the point and then asks about it.
func (a *app) agreedPoint(ctx context.Context, r api.PointRequest, yes bool, question string) (*client.Client, api.Point, error) {
	if err := name(r.Name); err != nil {
		return nil, api.Point{}, err
	}
	c, err := a.connect(ctx, nil)
	if err != nil {
		return nil, api.Point{}, err
	}
	p, err := c.FindPoint(ctx, r)
	if err != nil {
		return nil, p, err
	}
	what := fmt.Sprintf("restore point %s of %s", title(p), p.Created.Local().Format(time.DateTime))
	return c, p, a.confirm(yes, fmt.Sprintf(question, r.Name, what))
}

func (a *app) pointFork() *cobra.Command {
	return &cobra.Command{
		Use: "fork NAME POINT NEW", Short: "Make a new sandbox of a restore point",
		Args: args(3, 3, "point fork NAME POINT NEW"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			if err := firstBad(words[0], words[2]); err != nil {
				return err
			}
			c, err := a.connect(cmd.Context(), nil)
			if err != nil {
				return err
			}
			v, err := c.ForkPoint(cmd.Context(), api.PointForkRequest{Name: words[0], Point: words[1], New: words[2]})
			if err != nil {
				return err
			}
			return a.print(v, func() { fmt.Fprintf(a.out, "%s: %s\n", v.Name, v.Phase) })
		},
	}
}

func (a *app) pointRm() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "rm NAME POINT", Short: "Remove a restore point",
		Args: args(2, 2, "point rm NAME POINT [--yes]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			r := api.PointRequest{Name: words[0], Point: words[1]}
			c, _, err := a.agreedPoint(cmd.Context(), r, yes, "of sandbox %q, remove %s?")
			if err != nil {
				return err
			}
			p, err := c.RemovePoint(cmd.Context(), r)
			if err != nil {
				return err
			}
			return a.print(p, func() { fmt.Fprintf(a.out, "%s: %s removed\n", r.Name, title(p)) })
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

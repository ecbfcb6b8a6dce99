package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
)

func (a *app) fork() *cobra.Command {
	var r api.ForkRequest
	cmd := &cobra.Command{
		Use: "fork NAME NEW", Short: "Copy a sandbox with its running programs, which carry on in the copy",
		Example: "  doz fork a1 a2\n  doz fork a1 try --count 5",
		Args:    args(2, 2, "fork NAME NEW [--count N]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			r.Name, r.New = names[0], names[1]
			if err := firstBad(r.Name, r.New); err != nil {
				return err
			}
			if r.Count < 1 {
				return &api.Error{Kind: api.KindUsage, Message: "--count must be 1 or more"}
			}
			steps := a.steps("fork " + r.Name)
			defer steps.end()
			c, err := a.connect(cmd.Context(), steps.show)
			if err != nil {
				return err
			}
			result, err := c.Fork(cmd.Context(), r)
			if err != nil {
				return err
			}
			steps.end()
			return a.print(result, func() {
				a.notes(result.Notes)
				for _, v := range result.Sandboxes {
					fmt.Fprintf(a.out, "%s: %s\n", v.Name, v.Phase)
				}
				fmt.Fprintf(a.out, "%s: forked after %s\n", r.Name, precise(result.Millis))
			})
		},
	}
	cmd.Flags().IntVar(&r.Count, "count", 1, "how many copies; above 1 they are named NEW-1, NEW-2, …")
	cmd.Flags().BoolVar(&r.NoWake, "no-wake", false, "leave the copies hibernated")
	return cmd
}

func (a *app) duplicate() *cobra.Command {
	var r api.DuplicateRequest
	var memory, point string
	cmd := &cobra.Command{
		Use: "duplicate NAME NEW", Short: "Make a new sandbox, off, of another's disk",
		Args: args(2, 2, "duplicate NAME NEW [--from-point POINT]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) (err error) {
			r.Name, r.New = names[0], names[1]
			if err := firstBad(r.Name, r.New); err != nil {
				return err
			}
			if r.MemoryMiB, err = mebibytes("--memory", memory); err != nil {
				return err
			}
			if point != "" && (r.CPUs != 0 || r.MemoryMiB != 0) {
				return &api.Error{Kind: api.KindUsage, Message: "--from-point takes neither --cpus nor --memory: what a restore point holds has its own"}
			}
			c, err := a.connect(cmd.Context(), nil)
			if err != nil {
				return err
			}
			var result api.DuplicateResult
			if point != "" {
				result.Sandbox, err = c.ForkPoint(cmd.Context(), api.PointForkRequest{Name: r.Name, Point: point, New: r.New})
			} else {
				result, err = c.Duplicate(cmd.Context(), r)
			}
			if err != nil {
				return err
			}
			return a.print(result, func() {
				a.notes(result.Notes)
				fmt.Fprintf(a.out, "%s: %s\n", result.Sandbox.Name, result.Sandbox.Phase)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&point, "from-point", "", "of a restore point instead of what the disk is now")
	f.IntVar(&r.CPUs, "cpus", 0, "processors, 1 to 64 (default as the other)")
	f.StringVar(&memory, "memory", "", "memory, as in 2G, 512M or MiB (default as the other)")
	return cmd
}

// firstBad refuses names that can be none.
func firstBad(names ...string) error {
	for _, n := range names {
		if err := name(n); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) reset() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "reset NAME", Short: "End a sandbox's programs and make its disk anew from its image",
		Args: args(1, 1, "reset NAME [--yes]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			c, err := a.agreed(cmd.Context(), names[0], yes, func(v api.Sandbox) string {
				return fmt.Sprintf("reset sandbox %q (%s), losing everything on its disk? its restore points stay", v.Name, v.Phase)
			})
			if err != nil {
				return err
			}
			t, err := c.Reset(cmd.Context(), names[0])
			if err != nil {
				return err
			}
			return a.print(t, func() {
				fmt.Fprintf(a.out, "%s: %s, its disk as image %s is now\n", t.Sandbox.Name, t.Sandbox.Phase, t.Sandbox.Image)
			})
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

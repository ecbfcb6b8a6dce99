package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
)

// createOptions are what a sandbox can be made with.
type createOptions struct {
	image                 string
	cpus                  int
	memory, disk, network string
	audio, isolated       bool
}

// createFlags are their names.
var createFlags = []string{"image", "cpus", "memory", "disk", "network", "audio", "isolated"}

func (a *app) createOptions(cmd *cobra.Command, o *createOptions) {
	f := cmd.Flags()
	f.StringVar(&o.image, "image", "lab", "image to make it from")
	f.IntVar(&o.cpus, "cpus", 0, "processors, 1 to 64 (default 2)")
	f.StringVar(&o.memory, "memory", "", "memory, as in 2G, 512M or MiB (default 1G)")
	f.StringVar(&o.disk, "disk", "", "root disk, as in 64G; it takes what is used (default 64G)")
	f.StringVar(&o.network, "network", "", "network: none is the only one so far")
	f.BoolVar(&o.audio, "audio", false, "give it this computer's microphone and speakers (not built yet)")
	f.BoolVar(&o.isolated, "isolated", false, "share no folder of this computer (always so, so far)")
	cmd.RegisterFlagCompletionFunc("image", a.completeImage)
}

// request is what the options ask for.
func (o createOptions) request(sandbox string) (r api.CreateRequest, err error) {
	r = api.CreateRequest{Name: sandbox, Image: o.image, CPUs: o.cpus}
	if err := name(r.Name); err != nil {
		return r, err
	}
	if r.MemoryMiB, err = mebibytes("--memory", o.memory); err != nil {
		return r, err
	}
	mib, err := mebibytes("--disk", o.disk)
	if err != nil {
		return r, err
	}
	if r.DiskGiB = mib / 1024; mib%1024 != 0 {
		return r, &api.Error{Kind: api.KindUsage, Message: "--disk must be whole GiB, as in 64G"}
	}
	if o.audio {
		return r, &api.Error{Kind: api.KindNotBuilt, Message: "audio sandboxes are not built yet"}
	}
	if o.network != "" && o.network != "none" {
		return r, &api.Error{Kind: api.KindNotBuilt, Message: fmt.Sprintf("network %q is not built yet", o.network), Hint: "the only network so far is: none"}
	}
	return r, nil
}

func (a *app) create() *cobra.Command {
	var o createOptions
	var start bool
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make a sandbox",
		Example: "  doz create a1\n  doz create a2 --image lab --cpus 4 --memory 4G --start",
		Args:    args(1, 1, "create NAME [--image IMAGE]"),
		RunE: func(cmd *cobra.Command, names []string) error {
			r, err := o.request(names[0])
			if err != nil {
				return err
			}
			return a.runCreate(cmd.Context(), r, start)
		},
	}
	a.createOptions(cmd, &o)
	cmd.Flags().BoolVar(&start, "start", false, "start it")
	return cmd
}

func (a *app) runCreate(ctx context.Context, r api.CreateRequest, start bool) error {
	steps := a.steps("create " + r.Name)
	defer steps.end()
	c, err := a.connect(ctx, steps.show)
	if err != nil {
		return err
	}
	v, err := c.Create(ctx, r)
	if err != nil {
		return err
	}
	if start {
		started, err := c.Start(ctx, r.Name)
		if err != nil {
			return err
		}
		v = started.Sandbox
	}
	steps.end()
	return a.print(v, func() { fmt.Fprintf(a.out, "%s: %s\n", v.Name, v.Phase) })
}

func (a *app) shutdown() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "shutdown NAME", Short: "End a sandbox's programs; its disk is kept",
		Args: args(1, 1, "shutdown NAME [--yes]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			c, err := a.agreed(cmd.Context(), names[0], yes, func(v api.Sandbox) string {
				return fmt.Sprintf("shut down sandbox %q and end every program in it?", v.Name)
			})
			if err != nil {
				return err
			}
			v, err := c.Shutdown(cmd.Context(), names[0])
			if err != nil {
				return err
			}
			return a.print(v, func() {
				fmt.Fprintf(a.out, "%s: %s\n", v.Name, v.Phase)
				if v.Problem != "" {
					a.notes([]string{v.Problem})
				}
			})
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

// agreed connects, finds the sandbox and then asks about it.
func (a *app) agreed(ctx context.Context, sandbox string, yes bool, question func(api.Sandbox) string) (*client.Client, error) {
	if err := name(sandbox); err != nil {
		return nil, err
	}
	c, err := a.connect(ctx, nil)
	if err != nil {
		return nil, err
	}
	v, err := c.Inspect(ctx, sandbox)
	if err != nil {
		return nil, err
	}
	return c, a.confirm(yes, question(v))
}

func (a *app) rm() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "rm NAME", Short: "Remove a sandbox and everything in it",
		Args: args(1, 1, "rm NAME [--yes]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			c, err := a.agreed(cmd.Context(), names[0], yes, func(v api.Sandbox) string {
				return fmt.Sprintf("remove sandbox %q (%s, image %s) and everything in it?", v.Name, v.Phase, v.Image)
			})
			if err != nil {
				return err
			}
			if err := c.Remove(cmd.Context(), names[0]); err != nil {
				return err
			}
			return a.print(map[string]string{"removed": names[0]}, func() { fmt.Fprintf(a.out, "%s: removed\n", names[0]) })
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

// mebibytes reads a size: 2G, 512M, or a number of MiB.
func mebibytes(flag, s string) (int, error) {
	if s == "" {
		return 0, nil
	}
	digits, unit := strings.ToUpper(s), 1
	for suffix, u := range map[string]int{"GIB": 1024, "GB": 1024, "G": 1024, "MIB": 1, "MB": 1, "M": 1} {
		if rest, ok := strings.CutSuffix(digits, suffix); ok {
			digits, unit = rest, u
			break
		}
	}
	n, err := strconv.Atoi(digits)
	if err != nil || n <= 0 || n > 1<<30 {
		return 0, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("%s: %q is no size; write 2G, 512M or a number of MiB", flag, s)}
	}
	return n * unit, nil
}

package cli

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
)

func (a *app) template() *cobra.Command {
	cmd := &cobra.Command{
		Use: "template", Short: "Make an image of a sandbox's disk",
		Args: args(0, 0, "template create|ls|rm"),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.templateCreate(), a.templateLs(), a.templateRm())
	return cmd
}

func (a *app) templateCreate() *cobra.Command {
	var r api.TemplateRequest
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make an image of a sandbox's disk as it is now",
		Example: "  doz template create a1 --as mine\n  doz create a2 --image mine",
		Args:    args(1, 1, "template create NAME --as IMAGE [--from-point POINT]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			if r.Name = names[0]; r.As == "" {
				return &api.Error{Kind: api.KindUsage, Message: "the image's name is missing", Hint: "say it with: --as IMAGE"}
			}
			if err := firstBad(r.Name, r.As); err != nil {
				return err
			}
			c, err := a.connect(cmd.Context(), nil)
			if err != nil {
				return err
			}
			v, err := c.MakeTemplate(cmd.Context(), r)
			if err != nil {
				return err
			}
			return a.print(v, func() { fmt.Fprintf(a.out, "%s: image %.12s of sandbox %s\n", v.Name, v.Key, r.Name) })
		},
	}
	cmd.Flags().StringVar(&r.As, "as", "", "name of the image")
	cmd.Flags().StringVar(&r.Point, "from-point", "", "of a restore point instead of what the disk is now")
	return cmd
}

func (a *app) templateLs() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the images that were made of sandboxes", Args: args(0, 0, "template ls"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := a.local()
			if err != nil {
				return err
			}
			list, err := l.Images()
			if err != nil {
				return err
			}
			list = slices.DeleteFunc(append([]api.Image{}, list...), func(v api.Image) bool { return v.Source != "template" })
			return a.print(list, func() { a.listImages(list) })
		},
	}
}

func (a *app) templateRm() *cobra.Command {
	cmd := a.imageRm()
	cmd.Short = "Remove a template that no sandbox is made from"
	return cmd
}

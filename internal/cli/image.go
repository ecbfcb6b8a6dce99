package cli

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
)

func (a *app) image() *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Import, list and remove images", Args: args(0, 0, "image import|ls|rm"),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.imageImport(), a.imageLs(), a.imageRm())
	return cmd
}

func (a *app) imageImport() *cobra.Command {
	return &cobra.Command{
		Use: "import NAME PATH", Short: "Make an image of a rootfs tar, an OCI layout or an OCI or docker archive",
		Example: "  doz image import lab lab.tar\n  doz image import debian ./oci-layout",
		Args:    args(2, 2, "image import NAME PATH"),
		RunE: func(cmd *cobra.Command, words []string) error {
			if err := name(words[0]); err != nil {
				return err
			}
			path, err := filepath.Abs(words[1])
			if err != nil {
				return &api.Error{Kind: api.KindFailed, Message: err.Error()}
			}
			steps := a.steps("import " + words[0])
			defer steps.end()
			c, err := a.connect(cmd.Context(), steps.show)
			if err != nil {
				return err
			}
			v, err := c.ImportImage(cmd.Context(), api.ImageImportRequest{Name: words[0], Path: path})
			if err != nil {
				return err
			}
			steps.end()
			return a.print(v, func() {
				fmt.Fprintf(a.out, "%s: image %.12s of a %s, %s on disk\n", v.Name, v.Key, v.Source, size(v.DiskBytes))
			})
		},
	}
}

func (a *app) imageLs() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the images", Args: args(0, 0, "image ls"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := a.local()
			if err != nil {
				return err
			}
			list, err := l.Images()
			if err != nil {
				return err
			}
			if list == nil {
				list = []api.Image{}
			}
			return a.print(list, func() {
				a.listImages(list)
			})
		},
	}
}

func (a *app) imageRm() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "rm NAME", Short: "Remove an image that no sandbox is made from", Args: args(1, 1, "image rm NAME [--yes]"),
		ValidArgsFunction: a.completeImage,
		RunE: func(cmd *cobra.Command, names []string) error {
			l, err := a.local()
			if err != nil {
				return err
			}
			list, err := l.Images()
			if err != nil {
				return err
			}
			found := false
			for _, v := range list {
				found = found || v.Name == names[0]
			}
			if !found {
				return &api.Error{Kind: api.KindNotFound, Message: fmt.Sprintf("no image is named %q", names[0]), Hint: "see which there are with: doz image ls"}
			}
			if err := a.confirm(yes, fmt.Sprintf("remove image %q?", names[0])); err != nil {
				return err
			}
			c, err := a.connect(cmd.Context(), nil)
			if err != nil {
				return err
			}
			if err := c.RemoveImage(cmd.Context(), names[0]); err != nil {
				return err
			}
			return a.print(map[string]string{"removed": names[0]}, func() { fmt.Fprintf(a.out, "%s: removed\n", names[0]) })
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

// listImages prints images for people.
func (a *app) listImages(list []api.Image) {
	if len(list) == 0 {
		fmt.Fprintln(a.err, "no images; make one with: doz image import NAME PATH")
		return
	}
	t := newTable(a.out, "NAME", "KEY", "SOURCE", "DISK", "CREATED", "USED BY")
	for _, v := range list {
		used := strings.Join(v.UsedBy, " ")
		if v.Problem != "" {
			used = v.Problem
		}
		t.row(v.Name, fmt.Sprintf("%.12s", v.Key), v.Source, size(v.DiskBytes), v.Created.Local().Format("2006-01-02 15:04"), used)
	}
	t.flush()
}

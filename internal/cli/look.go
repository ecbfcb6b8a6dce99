package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"dozable.com/doz/internal/api"
)

func (a *app) ls() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the sandboxes", Args: args(0, 0, "ls"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, l, err := a.reader(cmd.Context())
			if err != nil {
				return err
			}
			var list []api.Sandbox
			if c != nil {
				list, err = c.List(cmd.Context())
			} else {
				list, err = l.List()
			}
			if err != nil {
				return err
			}
			if list == nil {
				list = []api.Sandbox{}
			}
			return a.print(list, func() { a.table(list) })
		},
	}
}

// table prints sandboxes, one a line.
func (a *app) table(list []api.Sandbox) {
	if len(list) == 0 {
		fmt.Fprintln(a.err, "no sandboxes; make one with: doz create NAME")
		return
	}
	t := newTable(a.out, "NAME", "IMAGE", "PHASE", "MEMORY", "DISK", "NETWORK", "NOTES")
	for _, v := range list {
		memory := "-"
		if v.MemoryBytes > 0 {
			memory = size(v.MemoryBytes)
		}
		t.row(v.Name, v.Image, string(v.Phase), memory, size(v.DiskBytes), v.Network, notes(v))
	}
	t.flush()
}

// notes are what a sandbox's row says besides its columns.
func notes(v api.Sandbox) string {
	var notes []string
	if v.Isolated {
		notes = append(notes, "isolated")
	}
	if v.DiedWithHost {
		notes = append(notes, "died")
	}
	if v.Unresponsive {
		notes = append(notes, "unresponsive")
	}
	if v.Phase == api.Damaged || v.Phase == api.Failed {
		notes = append(notes, v.Problem)
	}
	return strings.Join(notes, ", ")
}

func (a *app) inspect() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Show everything about a sandbox, as JSON", Args: args(1, 1, "inspect NAME"),
		ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := name(names[0]); err != nil {
				return err
			}
			c, l, err := a.reader(cmd.Context())
			if err != nil {
				return err
			}
			var v api.Sandbox
			if c != nil {
				v, err = c.Inspect(cmd.Context(), names[0])
			} else {
				v, err = l.Inspect(names[0])
			}
			if err != nil {
				return err
			}
			return a.document(v)
		},
	}
}

func (a *app) events() *cobra.Command {
	return &cobra.Command{
		Use: "events [NAME]", Short: "Follow what happens to sandboxes", Args: args(0, 1, "events [NAME]"),
		Long: `Follow what happens to sandboxes, from now on: phases they come to, and the timed steps
on the way. With --json a line is one event.`,
		ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			for _, n := range names {
				if err := name(n); err != nil {
					return err
				}
			}
			c, err := a.connect(cmd.Context(), nil)
			if err != nil {
				return err
			}
			return c.Events(cmd.Context(), strings.Join(names, ""), func(line json.RawMessage, e api.Event) {
				if a.json {
					fmt.Fprintf(a.out, "%s\n", line)
					return
				}
				what := string(e.Phase)
				if e.Event == "step" {
					what = "· " + e.Step
				} else if what == "" {
					what = e.Event
				}
				fmt.Fprintf(a.out, "%s  %-20s %s  %s\n", e.At.Local().Format("15:04:05.000"), e.Name, oneLine(what), oneLine(e.Note))
			})
		},
	}
}

func (a *app) console() *cobra.Command {
	var follow, list, steps bool
	var number int
	cmd := &cobra.Command{
		Use: "console NAME", Short: "Show what a sandbox printed while it booted",
		Long: `Show what a sandbox printed while it booted. The last five boots are kept, whether or
not the sandbox runs.`,
		Example: "  doz console a1 --steps       where the time of the latest boot went\n  doz console a1 --list        the kept boots\n  doz console a1 --boot 2      the one before the latest",
		Args:    args(1, 1, "console NAME [--follow | --list | --steps] [--boot N]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := name(names[0]); err != nil {
				return err
			}
			if number < 1 {
				return &api.Error{Kind: api.KindUsage, Message: "--boot must be 1, for the latest, or more"}
			}
			if follow && list || (follow || list) && (steps || cmd.Flags().Changed("boot")) {
				return &api.Error{Kind: api.KindUsage, Message: "--follow and --list each go with no other of --follow, --list, --steps and --boot"}
			}
			l, err := a.local()
			if err != nil {
				return err
			}
			switch {
			case follow:
				c, err := a.connect(cmd.Context(), nil)
				if err != nil {
					return err
				}
				return c.Console(cmd.Context(), names[0], func(text string) {
					if a.json {
						json.NewEncoder(a.out).Encode(api.ConsoleText{Event: "console", Text: text})
						return
					}
					io.WriteString(a.out, harmless(text))
				})
			case list:
				boots, err := l.Boots(names[0])
				if err != nil {
					return err
				}
				return a.print(boots, func() { a.boots(boots) })
			}
			boot, err := l.Boot(names[0], number)
			if err != nil {
				return err
			}
			return a.print(boot, func() {
				if steps {
					a.bootSteps(boot)
				}
				io.WriteString(a.out, harmless(boot.Console))
			})
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "go on while the sandbox runs")
	f.BoolVar(&list, "list", false, "list the kept boots")
	f.BoolVar(&steps, "steps", false, "show the boot's timed steps first")
	f.IntVar(&number, "boot", 1, "which kept boot; 1 is the latest")
	return cmd
}

func (a *app) boots(boots []api.Boot) {
	t := newTable(a.out, "BOOT", "WHEN", "KIND", "TOOK", "", "PROBLEM")
	for _, b := range boots {
		mark := "✓"
		if !b.OK {
			mark = "✗"
		}
		t.row(fmt.Sprint(b.Number), b.At.Local().Format("2006-01-02 15:04:05"), b.Kind, seconds(b.Millis), mark, b.Problem)
	}
	t.flush()
}

func (a *app) bootSteps(b api.Boot) {
	t := newTable(a.out)
	for _, s := range b.Steps {
		t.row(fmt.Sprintf("%6d ms", s.Millis), s.Name, s.Note)
	}
	t.flush()
	fmt.Fprintln(a.out)
}

// harmless takes from a guest's text what could steer the terminal.
func harmless(s string) string {
	return strings.Map(func(r rune) rune {
		if (r < ' ' && r != '\n' && r != '\t') || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return -1
		}
		return r
	}, s)
}

// oneLine is harmless text on one line.
func oneLine(s string) string {
	return strings.NewReplacer("\n", " ", "\t", " ").Replace(harmless(s))
}

// table aligns columns.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, head ...string) table {
	t := table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	if len(head) > 0 {
		t.row(head...)
	}
	return t
}

func (t table) row(cells ...string) {
	for i := range cells {
		cells[i] = oneLine(cells[i])
	}
	fmt.Fprintln(t.w, strings.TrimRight(strings.Join(cells, "\t"), "\t "))
}

func (t table) flush() { t.w.Flush() }

// size is bytes for people.
func size(n int64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}

// count is a number of things for people.
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// seconds is a duration for people.
func seconds(millis int64) string {
	if millis < 10_000 {
		return fmt.Sprintf("%.2f s", float64(millis)/1000)
	}
	return fmt.Sprintf("%d s", millis/1000)
}

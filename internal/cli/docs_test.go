package cli

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// flagName finds the long name at the beginning of a line of a command's usage.
var flagName = regexp.MustCompile(`(?m)^ +(?:-., )?(--[a-z-]+)`)

// TestCommandsAreDocumented: every command has its part in docs/cli.md, which tells of
// every option it has; so has every kind of error.
func TestCommandsAreDocumented(t *testing.T) {
	data, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	root := (&app{}).root()
	options := func(where, usages, text string) {
		for _, found := range flagName.FindAllStringSubmatch(usages, -1) {
			if !strings.Contains(text, "`"+found[1]) {
				t.Errorf("docs/cli.md does not tell of %s %s", where, found[1])
			}
		}
	}
	options("doz", root.PersistentFlags().FlagUsages(), page)
	checked := 0
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			visit(sub)
		}
		if c.HasSubCommands() || c.Hidden {
			return
		}
		checked++
		// The heading is the usage: the command's path and its arguments.
		usage := c.CommandPath() + strings.TrimPrefix(c.Use, c.Name())
		_, part, found := strings.Cut(page, "\n### "+usage+"\n")
		if !found {
			t.Errorf("docs/cli.md has no part %q", usage)
		}
		part, _, _ = strings.Cut(part, "\n### ")
		options(c.CommandPath(), c.LocalNonPersistentFlags().FlagUsages(), part)
	}
	visit(root)
	if checked < 14 {
		t.Errorf("only %d commands were looked for", checked)
	}
	for kind := range exitCodes {
		if !strings.Contains(page, "`"+string(kind)+"`") {
			t.Errorf("docs/cli.md does not tell of error %s", kind)
		}
	}
}

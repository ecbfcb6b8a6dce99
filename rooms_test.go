// Package doz holds the test that guards which way imports run. Everything else is in
// cmd and internal.
package doz

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "dozable.com/doz/"

// rooms says what of ours each package may import, tests left out. What is not named
// may import nothing of ours; a package that is in no row fails the test.
var rooms = map[string]string{
	// The command line: one way, downwards.
	"internal/cli":    "client api guest term",
	"internal/client": "wire api guest",
	"internal/wire":   "api guest",
	"internal/api":    "",

	// The host: likewise. It knows the engine only by its boundary.
	"internal/host":    "sandbox image wire api store vm guest",
	"internal/sandbox": "store vm guest api",
	"internal/image":   "store vm guest api",
	"internal/doctor":  "store vm parts api",
	"internal/parts":   "store",
	"internal/store":   "",

	// Engines know nothing of sandboxes.
	"internal/vm":        "",
	"internal/vm/qemu":   "vm guest",
	"internal/vm/vmfake": "vm guest",
	"internal/vm/vmtest": "vm guest",

	// The network knows neither machines nor sandboxes.
	"internal/network":        "guest network/link network/policy network/sniff",
	"internal/network/link":   "",
	"internal/network/policy": "",
	"internal/network/sniff":  "",

	// What runs in the guest sees only what host and guest share.
	"cmd/deckhold":    "guest layer term",
	"cmd/doznet":      "guest",
	"internal/guest":  "",
	"internal/layer":  "",
	"internal/term":   "",
	"internal/initrd": "",

	// The composition root, and what builds and measures.
	"cmd/doz":    "cli host sandbox image store parts doctor api vm vm/qemu",
	"guest/pack": "initrd parts",
	"bench":      "api guest initrd parts vm vm/qemu",
	"bench/init": "",
	"test/vm":    "api",
}

func TestImportsRunDownwards(t *testing.T) {
	found := imports(t)
	for name := range rooms {
		if found[name] == nil {
			t.Errorf("%s is in the table and not in the tree", name)
		}
	}
	for name, imported := range found {
		may, known := rooms[name]
		if !known {
			t.Errorf("%s is in no row: say what it may import", name)
			continue
		}
		for _, i := range imported {
			if !slices.Contains(strings.Fields(may), strings.TrimPrefix(i, "internal/")) {
				t.Errorf("%s imports %s, which is not below it", name, i)
			}
		}
	}
}

// imports gives each package's imports of ours, tests left out, those of every
// platform included. It reads the files itself and does not ask go list, because go
// test remembers a test's result until a file that the test itself opened changes.
func imports(t *testing.T) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(name, ".") || name == "testdata"):
			return fs.SkipDir
		case d.IsDir(), !strings.HasSuffix(name, ".go"), strings.HasSuffix(name, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		room := filepath.Dir(path)
		found[room] = append([]string{}, found[room]...)
		for _, i := range file.Imports {
			if ours, is := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), module); is {
				found[room] = append(found[room], ours)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

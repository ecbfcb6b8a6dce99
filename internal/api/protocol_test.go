package api_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// TestProtocolIsDocumented: every operation, kind, phase, event and field of this
// package stands in docs/protocol.md.
func TestProtocolIsDocumented(t *testing.T) {
	page := read(t, "../../docs/protocol.md")
	file := parse(t, "api.go")
	checked := 0
	for _, word := range stringConstants(file) {
		checked++
		if !mentions(page, word) {
			t.Errorf("docs/protocol.md does not tell of %q", word)
		}
	}
	for name, fields := range structs(file) {
		for _, field := range fields {
			checked++
			if !mentions(about(page, name), field) {
				t.Errorf("docs/protocol.md does not tell of %s's field %q", name, field)
			}
		}
	}
	if checked < 120 {
		t.Errorf("only %d words were looked for", checked)
	}
}

// TestFramesAreDocumented: so does every frame type, by its number and name, and every
// field of what frames carry. Frames are package guest's, which this one must not know.
func TestFramesAreDocumented(t *testing.T) {
	page := read(t, "../../docs/protocol.md")
	_, frames, found := strings.Cut(page, "\n## Frames\n")
	if !found {
		t.Fatal("docs/protocol.md has no part on frames")
	}
	frames, _, _ = strings.Cut(frames, "\n## ")
	file := parse(t, "../guest/guest.go")
	rows := 0
	for name, value := range byteConstants(file) {
		rows++
		if row := fmt.Sprintf("\n| %s %s |", value, strings.ToLower(name)); !strings.Contains(frames, row) {
			t.Errorf("docs/protocol.md has no row %q in its table of frames", row)
		}
	}
	if rows < 7 {
		t.Errorf("only %d types of frames were looked for", rows)
	}
	known := structs(file)
	for _, name := range []string{"ExitStatus", "Error"} {
		if len(known[name]) == 0 {
			t.Errorf("package guest has no %s", name)
		}
		for _, field := range known[name] {
			if !mentions(frames, field) {
				t.Errorf("docs/protocol.md does not tell of the field %q of a frame's %s", field, name)
			}
		}
	}
}

// TestExampleIsTheFile: the client on the page is the one the tests run.
func TestExampleIsTheFile(t *testing.T) {
	example := read(t, "../../docs/example_client.py")
	if !strings.Contains(read(t, "../../docs/protocol.md"), "```python\n"+example+"```\n") {
		t.Error("the client in docs/protocol.md is not docs/example_client.py")
	}
}

// about is the page's entry on a type, or the whole page for a type that has none.
func about(page, name string) string {
	_, entry, found := strings.Cut(page, "\n- **"+name+"**:")
	if !found {
		return page
	}
	entry, _, _ = strings.Cut(entry, "\n- **")
	entry, _, _ = strings.Cut(entry, "\n## ")
	return entry
}

func mentions(text, word string) bool {
	return strings.Contains(text, "`"+word+"`") || strings.Contains(text, `"`+word+`"`)
}

// structs gives each struct's JSON names.
func structs(file *ast.File) map[string][]string {
	found := map[string][]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if s, ok := spec.Type.(*ast.StructType); ok {
			for _, field := range s.Fields.List {
				if field.Tag != nil {
					tag, _ := strconv.Unquote(field.Tag.Value)
					name, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
					found[spec.Name.Name] = append(found[spec.Name.Name], name)
				}
			}
		}
		return true
	})
	return found
}

func stringConstants(file *ast.File) (values []string) {
	constants(file, func(_ string, _ ast.Expr, value *ast.BasicLit) {
		if value.Kind == token.STRING {
			s, _ := strconv.Unquote(value.Value)
			values = append(values, s)
		}
	})
	return values
}

func byteConstants(file *ast.File) map[string]string {
	values := map[string]string{}
	constants(file, func(name string, typ ast.Expr, value *ast.BasicLit) {
		if t, ok := typ.(*ast.Ident); ok && t.Name == "byte" {
			values[name] = value.Value
		}
	})
	return values
}

// constants calls each with every constant that is a literal.
func constants(file *ast.File, each func(name string, typ ast.Expr, value *ast.BasicLit)) {
	for _, decl := range file.Decls {
		group, ok := decl.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		for _, spec := range group.Specs {
			s := spec.(*ast.ValueSpec)
			for i, v := range s.Values {
				if lit, ok := v.(*ast.BasicLit); ok {
					each(s.Names[i].Name, s.Type, lit)
				}
			}
		}
	}
}

func parse(t *testing.T, path string) *ast.File {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

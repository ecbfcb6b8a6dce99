package api_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// TestProtocolIsDocumented: every operation, kind, event and field of this package
// stands in docs/protocol.md.
func TestProtocolIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	file, err := parser.ParseFile(token.NewFileSet(), "api.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	want := func(word string) {
		checked++
		for _, form := range []string{"`" + word + "`", `"` + word + `"`} {
			if strings.Contains(string(page), form) {
				return
			}
		}
		t.Errorf("docs/protocol.md does not tell of %q", word)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ValueSpec:
			for _, v := range n.Values {
				if lit, ok := v.(*ast.BasicLit); ok && lit.Kind == token.STRING {
					s, _ := strconv.Unquote(lit.Value)
					want(s)
				}
			}
		case *ast.Field:
			if n.Tag != nil {
				tag, _ := strconv.Unquote(n.Tag.Value)
				name, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
				want(name)
			}
		}
		return true
	})
	if checked < 80 {
		t.Errorf("only %d words were looked for", checked)
	}
}

// TestExampleIsTheFile: the client on the page is the one the tests run.
func TestExampleIsTheFile(t *testing.T) {
	page, err := os.ReadFile("../../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("../../docs/example_client.py")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), "```python\n"+string(example)+"```\n") {
		t.Error("the client in docs/protocol.md is not docs/example_client.py")
	}
}

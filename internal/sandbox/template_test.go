package sandbox

import (
	"os"
	"testing"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
	"dozable.com/doz/internal/vm/vmfake"
)

// templates are the folders of the store's boot templates.
func (w *world) templates(t *testing.T) (dirs []store.Template) {
	t.Helper()
	entries, err := os.ReadDir(w.store.TemplatesDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		dirs = append(dirs, w.store.Template(e.Name()))
	}
	return dirs
}

// TestTemplate starts sandboxes of one shape from one template, and each is itself.
func TestTemplate(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	boots := map[string]bool{}
	for _, name := range []string{"a1", "a2", "a3"} {
		create(t, m, name)
		boots[bootOf(t, m, name)] = true
		if b, _ := m.get(name); b.get().Fresh {
			t.Errorf("%s was not told to become itself", name)
		}
	}
	if len(boots) != 3 || len(w.templates(t)) != 1 {
		t.Errorf("3 sandboxes of one shape are of %d boots and %d templates", len(boots), len(w.templates(t)))
	}

	t.Run("a damaged one is made anew", func(t *testing.T) {
		dir := w.templates(t)[0]
		for _, path := range []string{dir.Memory(), dir.State(), dir.Record()} {
			if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := move(m, "a1", "shutdown"); err != nil {
				t.Fatal(err)
			}
			bootOf(t, m, "a1")
			if data, _ := os.ReadFile(path); string(data) == "{}" {
				t.Errorf("%s is as it was damaged", path)
			}
		}
	})

	t.Run("few are kept", func(t *testing.T) {
		for cpus := range maxTemplates + 2 {
			name := "c" + string(rune('a'+cpus))
			if _, err := m.Create(t.Context(), api.CreateRequest{Name: name, Image: "lab", CPUs: cpus + 3}); err != nil {
				t.Fatal(err)
			}
			bootOf(t, m, name)
		}
		if n := len(w.templates(t)); n != maxTemplates {
			t.Errorf("%d templates are kept", n)
		}
	})

	t.Run("one half made is swept", func(t *testing.T) {
		half := w.store.Template(newPrefix + "1")
		if err := os.MkdirAll(half.Machine(), 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := w.engine.Start(t.Context(), vm.Config{Dir: half.Machine(), CPUs: 1, MemoryMiB: 256, MemoryFile: half.Memory()}); err != nil {
			t.Fatal(err)
		}
		before := w.engine.Machines()
		w.manager(nil)
		if _, err := os.Stat(half.Dir()); err == nil || w.engine.Machines() != before-1 {
			t.Errorf("a half made template was left, with its machine (%d of %d)", w.engine.Machines(), before)
		}
	})
}

// TestNoTemplate boots a sandbox where none can be made.
func TestNoTemplate(t *testing.T) {
	w := newWorld(t, vmfake.Options{Fail: failAt("save")})
	m := w.manager(nil)
	create(t, m, "a1")
	bootOf(t, m, "a1")
	if n := len(w.templates(t)); n != 0 || w.engine.Machines() != 1 {
		t.Errorf("%d templates, %d machines", n, w.engine.Machines())
	}
}

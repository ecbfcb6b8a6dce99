package store

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type record struct {
	Schema int    `json:"schema"`
	Text   string `json:"text"`
}

func TestRecordRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.json")
	for _, want := range []record{{1, "first"}, {1, strings.Repeat("longer ", 1000)}, {1, "short"}} {
		if err := WriteRecord(path, want); err != nil {
			t.Fatal(err)
		}
		var got record
		if err := ReadRecord(path, 1, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the record's mode is %v, %v; want 0600", info.Mode(), err)
	}
	wantAlone(t, path)
}

// wantAlone fails when a writer left something beside its record.
func wantAlone(t *testing.T, path string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != filepath.Base(path) {
			t.Errorf("%s is left beside the record", e.Name())
		}
	}
}

// A reader sees a record whole, as it was or as it is, whoever writes.
func TestRecordIsReplacedWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.json")
	texts := []string{strings.Repeat("a", 50_000), strings.Repeat("b", 10)}
	if err := WriteRecord(path, record{1, texts[0]}); err != nil {
		t.Fatal(err)
	}
	var writers sync.WaitGroup
	for _, text := range texts {
		writers.Go(func() {
			for range 20 {
				if err := WriteRecord(path, record{1, text}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 200 {
		var got record
		if err := ReadRecord(path, 1, &got); err != nil {
			t.Error(err)
		} else if got.Text != texts[0] && got.Text != texts[1] {
			t.Errorf("read a mixture of %d bytes", len(got.Text))
		}
	}
	writers.Wait()
	wantAlone(t, path)
}

func TestFailedWriteLeavesTheRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.json")
	if err := WriteRecord(path, record{1, "kept"}); err != nil {
		t.Fatal(err)
	}
	if err := WriteRecord(path, map[string]any{"schema": 1, "f": func() {}}); err == nil {
		t.Error("what is no JSON was written")
	}
	var got record
	if err := ReadRecord(path, 1, &got); err != nil || got.Text != "kept" {
		t.Errorf("read %+v, %v", got, err)
	}
	// A folder in the way: the rename fails.
	dir := filepath.Join(t.TempDir(), "b.json")
	if err := os.MkdirAll(filepath.Join(dir, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	err := WriteRecord(dir, record{1, "x"})
	if err == nil || !strings.HasPrefix(err.Error(), "cannot write b.json: ") || strings.Count(err.Error(), "b.json") != 1 {
		t.Errorf("got error %v, want one that names b.json once", err)
	}
	wantAlone(t, dir)
	if err := WriteRecord(filepath.Join(t.TempDir(), "none", "a.json"), record{1, "x"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("writing into no folder gave %v", err)
	}
}

func TestRecordsThatCannotBeRead(t *testing.T) {
	for name, test := range map[string]struct {
		content string
		want    error
	}{
		"empty":          {"", ErrDamaged},
		"half":           {`{"schema":1,"te`, ErrDamaged},
		"zeroes":         {strings.Repeat("\x00", 100), ErrDamaged},
		"no schema":      {`{"text":"x"}`, ErrDamaged},
		"schema zero":    {`{"schema":0}`, ErrDamaged},
		"another shape":  {`{"schema":1,"text":7}`, ErrDamaged},
		"a list":         {`[1]`, ErrDamaged},
		"two records":    {`{"schema":1}{"schema":1}`, ErrDamaged},
		"too large":      {`{"schema":1}` + strings.Repeat(" ", maxRecord), ErrDamaged},
		"newer":          {`{"schema":3}`, ErrNewer},
		"newer in shape": {`{"schema":3,"text":{}}`, ErrNewer},
	} {
		path := filepath.Join(t.TempDir(), "a.json")
		if err := os.WriteFile(path, []byte(test.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := ReadRecord(path, 2, &record{}); !errors.Is(err, test.want) || !strings.HasPrefix(err.Error(), "cannot read a.json: ") {
			t.Errorf("%s: got %v, want %v", name, err, test.want)
		}
	}
	dir := t.TempDir()
	if err := ReadRecord(filepath.Join(dir, "none"), 1, &record{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no record: got %v", err)
	}
	if err := ReadRecord(dir, 1, &record{}); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder: got %v", err)
	}
}

func FuzzReadRecord(f *testing.F) {
	for _, seed := range []string{"", "{}", `{"schema":1,"text":"x"}`, `{"schema":2}`, `{"schema":1e99}`, `{"schema":-1}`, "null", `{"SCHEMA":1}`} {
		f.Add([]byte(seed))
	}
	path := filepath.Join(f.TempDir(), "a.json")
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		var got record
		err := ReadRecord(path, 1, &got)
		if err == nil && got.Schema != 1 {
			t.Fatalf("a record of schema %d was read", got.Schema)
		}
		if err != nil && !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewer) {
			t.Fatalf("%q gives %v", data, err)
		}
		if now, _ := os.ReadFile(path); !bytes.Equal(now, data) {
			t.Fatal("reading changed the record")
		}
	})
}

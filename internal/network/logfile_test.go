package network

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A log keeps the latest, in two files of a bounded size, and passes over half a line.
func TestLogFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "net.jsonl")
	l, err := OpenLog(path)
	if err != nil {
		t.Fatal(err)
	}
	const total = 2000
	why := strings.Repeat("x", 10000)
	for i := range total {
		if err := l.Write(Record{Time: time.Unix(int64(i), 0), Host: "good.example", Why: why}); err != nil {
			t.Fatal(err)
		}
	}
	l.Close()
	file, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	file.WriteString(`{"host":"half`)
	file.Close()
	var first, last, count int64
	err = ReadLog(path, func(r Record) bool {
		if count == 0 {
			first = r.Time.Unix()
		}
		if count > 0 && r.Time.Unix() != last+1 {
			t.Fatalf("%d after %d", r.Time.Unix(), last)
		}
		last = r.Time.Unix()
		count++
		return true
	})
	if err != nil || last != total-1 || first == 0 || count != last-first+1 {
		t.Errorf("%d records from %d to %d, %v", count, first, last, err)
	}
	for _, name := range []string{path, earlier(path)} {
		if info, err := os.Stat(name); err != nil || info.Size() > maxLogBytes || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

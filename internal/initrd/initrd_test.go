package initrd

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// node is an entry of a newc archive.
type node struct {
	Mode         uint64
	Major, Minor uint64
	Data         string
}

// parse reads a newc archive as the kernel does (init/initramfs.c).
func parse(t *testing.T, b []byte) (names []string, nodes map[string]node) {
	t.Helper()
	nodes = map[string]node{}
	take := func(n int) []byte {
		if n > len(b) {
			t.Fatalf("the archive ends %d bytes early", n-len(b))
		}
		part := b[:n]
		b = b[n:]
		return part
	}
	inodes := map[uint64]bool{}
	for {
		head := take(110)
		if string(head[:6]) != "070701" {
			t.Fatalf("an entry begins with %q", head[:6])
		}
		var field [13]uint64
		for i := range field {
			if _, err := fmt.Sscanf(string(head[6+8*i:14+8*i]), "%x", &field[i]); err != nil {
				t.Fatal(err)
			}
		}
		size, nameSize := int(field[6]), int(field[11])
		// The header and name are padded together, the data on its own.
		name := take((110+nameSize+3)&^3 - 110)
		if name[nameSize-1] != 0 {
			t.Fatalf("name %q does not end in a zero", name)
		}
		data := take((size + 3) &^ 3)[:size]
		if name := string(name[:nameSize-1]); name != "TRAILER!!!" {
			if inodes[field[0]] {
				t.Errorf("%s has the inode of another", name)
			}
			inodes[field[0]] = true
			if field[2] != 0 || field[3] != 0 || field[5] != 0 {
				t.Errorf("%s has owner %d:%d and time %d, want zeroes", name, field[2], field[3], field[5])
			}
			names = append(names, name)
			nodes[name] = node{field[1], field[9], field[10], string(data)}
			continue
		}
		if len(b) != 0 {
			t.Errorf("%d bytes follow the trailer", len(b))
		}
		return names, nodes
	}
}

func programs() map[string][]byte {
	return map[string][]byte{"deckhold": []byte("ELF…"), "b": []byte("12345"), "a": {}}
}

func TestArchive(t *testing.T) {
	var out bytes.Buffer
	if err := Write(&out, programs()); err != nil {
		t.Fatal(err)
	}
	names, got := parse(t, out.Bytes())
	want := map[string]node{
		"dev/console":      {Mode: 0o020600, Major: 5, Minor: 1},
		"dev/null":         {Mode: 0o020666, Major: 1, Minor: 3},
		"doz/bin/deckhold": {Mode: 0o100755, Data: "ELF…"},
		"doz/bin/a":        {Mode: 0o100755},
		"doz/bin/b":        {Mode: 0o100755, Data: "12345"},
		"init":             {Mode: 0o120777, Data: "doz/bin/deckhold"},
	}
	for _, dir := range []string{"dev", "proc", "sys", "run", "newroot", "mnt", "tmp", "doz", "doz/bin"} {
		want[dir] = node{Mode: 0o040755}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	// The kernel makes no parents.
	seen := map[string]bool{"": true}
	for _, name := range names {
		parent := ""
		if i := bytes.LastIndexByte([]byte(name), '/'); i >= 0 {
			parent = name[:i]
		}
		if !seen[parent] {
			t.Errorf("%s comes before its folder", name)
		}
		seen[name] = true
	}
}

func TestSameBytesEveryTime(t *testing.T) {
	var first bytes.Buffer
	if err := Write(&first, programs()); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		var again bytes.Buffer
		if err := Write(&again, programs()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(first.Bytes(), again.Bytes()) {
			t.Fatal("the same programs gave other bytes")
		}
	}
}

func TestProgramsStayAsTheyWere(t *testing.T) {
	all := make([]byte, 8)
	copy(all, "12345678")
	if err := Write(&bytes.Buffer{}, map[string][]byte{"deckhold": all[:5]}); err != nil {
		t.Fatal(err)
	}
	if string(all) != "12345678" {
		t.Errorf("writing a program changed the bytes behind it to %q", all)
	}
}

func TestFailures(t *testing.T) {
	if err := Write(&bytes.Buffer{}, map[string][]byte{"other": {}}); err == nil {
		t.Error("an initramfs without deckhold was written")
	}
	full := errors.New("no space")
	for room := range 20 {
		if err := Write(&disk{room, full}, programs()); !errors.Is(err, full) {
			t.Errorf("a disk that is full after %d writes: got %v", room, err)
		}
	}
}

type disk struct {
	room int
	err  error
}

func (d *disk) Write(b []byte) (int, error) {
	if d.room--; d.room < 0 {
		return 0, d.err
	}
	return len(b), nil
}

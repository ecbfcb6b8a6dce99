package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/store"
)

const (
	bootsKept  = 5
	bootSchema = 1
	maxSteps   = 64 // kept of one boot; the guest's share is bounded by it
)

// bootRecord is a boot on disk, beside its console.
type bootRecord struct {
	Schema  int            `json:"schema"`
	Kind    string         `json:"kind"`
	At      time.Time      `json:"at"`
	Millis  int64          `json:"milliseconds"`
	Ended   bool           `json:"ended"` // false: the host died while it booted
	Problem string         `json:"problem,omitempty"`
	Steps   []api.BootStep `json:"steps"`
}

// bootLog is the boot under way.
type bootLog struct {
	m       *Manager
	b       *box
	file    string
	console string
	record  bootRecord
	// A guest that was loaded had run for offset milliseconds, and went on when the log
	// was at resumed.
	offset, resumed int64
}

// beginBoot opens the log of the boot that was just counted, and drops old ones.
func (m *Manager) beginBoot(b *box, kind string) *bootLog {
	n := b.record.Boots
	l := &bootLog{m: m, b: b, file: b.dir.BootRecord(n), console: b.dir.BootLog(n),
		record: bootRecord{Schema: bootSchema, Kind: kind, At: time.Now()}}
	if err := os.MkdirAll(b.dir.BootsDir(), 0o700); err != nil {
		m.log.Warn("cannot keep boot logs", "sandbox", b.name, "error", err)
	}
	l.save()
	kept := bootNumbers(b.dir)
	for _, old := range kept[:max(0, len(kept)-bootsKept)] {
		os.Remove(b.dir.BootLog(old))
		os.Remove(b.dir.BootRecord(old))
	}
	return l
}

// step notes a step that has just ended.
func (l *bootLog) step(name, note string) {
	l.add(api.BootStep{Name: name, Millis: time.Since(l.record.At).Milliseconds(), Note: note})
}

// guest notes the guest's own steps, whose clock began with its kernel.
func (l *bootLog) guest(setup guest.SetupResponse) {
	for _, s := range setup.Steps {
		if s.Millis >= l.offset {
			l.add(api.BootStep{Name: "guest: " + clip(s.Name), Millis: l.resumed + s.Millis - l.offset, Note: clip(s.Note)})
		}
	}
	l.step("answers", "kernel "+clip(setup.Kernel))
}

func (l *bootLog) add(s api.BootStep) {
	if len(l.record.Steps) < maxSteps {
		l.record.Steps = append(l.record.Steps, s)
		l.m.tell(api.Event{Event: "step", Name: l.b.name, Step: s.Name, Millis: s.Millis, Note: s.Note})
	}
}

// end closes the log.
func (l *bootLog) end(err error) {
	l.record.Millis, l.record.Ended = time.Since(l.record.At).Milliseconds(), true
	if err != nil {
		l.record.Problem = err.Error()
	}
	l.save()
}

// save is not durable on purpose: a boot log is not worth an fsync a boot.
func (l *bootLog) save() {
	if err := writeQuick(l.file, l.record); err != nil {
		l.m.log.Warn("cannot keep a boot log", "sandbox", l.b.name, "error", err)
	}
}

// clip bounds what a guest says to one short printable line.
func clip(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return ' '
		}
		return r
	}, s)
	if len(s) > 200 {
		s = strings.ToValidUTF8(s[:200], "") + "…"
	}
	return s
}

// bootNumbers are the kept boots of a sandbox, oldest first.
func bootNumbers(dir store.Sandbox) []int {
	entries, _ := os.ReadDir(dir.BootsDir())
	var numbers []int
	for _, e := range entries {
		if base, ok := strings.CutSuffix(e.Name(), ".json"); ok {
			if n, err := strconv.Atoi(base); err == nil {
				numbers = append(numbers, n)
			}
		}
	}
	slices.Sort(numbers)
	return numbers
}

// Boots lists a sandbox's kept boots, the latest first, without their consoles. It
// needs no host.
func Boots(s *store.Store, name string) ([]api.Boot, error) {
	if _, err := load(s, name); err != nil {
		return nil, err
	}
	dir := s.Sandbox(name)
	numbers := bootNumbers(dir)
	slices.Reverse(numbers)
	boots := []api.Boot{}
	for i, n := range numbers {
		var r bootRecord
		boot := api.Boot{Number: i + 1, Steps: []api.BootStep{}}
		if err := store.ReadRecord(dir.BootRecord(n), bootSchema, &r); err != nil {
			boot.Problem = err.Error()
		} else {
			boot.Kind, boot.At, boot.Millis, boot.Problem = r.Kind, r.At, r.Millis, r.Problem
			boot.Steps = append(boot.Steps, r.Steps...)
			boot.OK = r.Ended && r.Problem == ""
		}
		boots = append(boots, boot)
	}
	return boots, nil
}

// Boot gives one kept boot with its console; number 1, or 0, is the latest.
func Boot(s *store.Store, name string, number int) (api.Boot, error) {
	boots, err := Boots(s, name)
	if err != nil {
		return api.Boot{}, err
	}
	number = max(number, 1)
	if number > len(boots) {
		e := &api.Error{Kind: api.KindNotFound, Message: fmt.Sprintf("sandbox %q has no kept boot %d", name, number)}
		if len(boots) == 0 {
			e.Message = fmt.Sprintf("sandbox %q has not booted yet", name)
			e.Hint = "start it with: doz start " + name
		} else {
			e.Hint = "see which there are with: doz console --list " + name
		}
		return api.Boot{}, e
	}
	boot := boots[number-1]
	f, err := os.Open(ConsoleFile(s, name, number))
	if errors.Is(err, fs.ErrNotExist) {
		return boot, nil
	}
	if err != nil {
		return boot, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot read the console of sandbox %q: %v", name, err)}
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 2*consoleLimit))
	if err != nil {
		return boot, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot read the console of sandbox %q: %v", name, err)}
	}
	boot.Console = string(text)
	return boot, nil
}

// ConsoleFile is where the console of a kept boot is; "" when there is none.
func ConsoleFile(s *store.Store, name string, number int) string {
	dir := s.Sandbox(name)
	numbers := bootNumbers(dir)
	if i := len(numbers) - max(number, 1); i >= 0 {
		return dir.BootLog(numbers[i])
	}
	return ""
}

// writeQuick puts a record in place whole, without waiting for the disk.
func writeQuick(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	tmp := filepath.Join(filepath.Dir(path), ".tmp-"+randomHex(4))
	if err := os.WriteFile(tmp, append(data, '\n'), 0o600); err != nil {
		os.Remove(tmp)
		return err
	}
	return os.Rename(tmp, path)
}

package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// A boot template is a machine saved when its guest first answered: booted, without a
// root disk yet, and without anything that makes it this or that sandbox. Any sandbox
// of the same shape is started by loading a copy, whose guest mounts that sandbox's
// disk and becomes it.

// shape is all of a machine that its template is made of.
type shape struct {
	Schema        int    `json:"schema"`
	Engine        string `json:"engine"`
	EngineVersion string `json:"engineVersion"`
	Accelerator   string `json:"accelerator"`
	MachineType   string `json:"machineType"`
	Kernel        string `json:"kernel"`
	Initrd        string `json:"initrd"`
	Tools         string `json:"tools"`
	CPUs          int    `json:"cpus"`
	MemoryMiB     int    `json:"memoryMiB"`
	DiskBytes     int64  `json:"diskBytes"`
	Audio         bool   `json:"audio,omitempty"`
}

// template is template.json.
type template struct {
	Schema    int    `json:"schema"`
	Shape     shape  `json:"shape"`
	Token     string `json:"token"` // of its guest channel, and of every machine made from it
	Millis    int64  `json:"milliseconds"`
	StateSum  uint32 `json:"stateSum"`
	MemorySum uint32 `json:"memorySum"`
}

const (
	templateSchema = 1
	// maxTemplates are kept, those used last; each takes some 60 MiB of the disk.
	maxTemplates = 6
	// templateRoom has to be free on the store's disk for one to be made or copied.
	templateRoom = 256 << 20
)

func (s shape) key() string {
	data, err := json.Marshal(s)
	if err != nil {
		panic(err) // plain fields only
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:8])
}

// fromTemplate loads a copy of the template of a machine's shape, which is made first
// when there is none. The machine stands; nothing of it is left when this fails.
func (m *Manager) fromTemplate(ctx context.Context, b *box, config vm.Config, log *bootLog, progress func(api.Progress)) (machine vm.Machine, err error) {
	if err := m.room(templateRoom); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.Remove(b.dir.State())
			os.Remove(b.dir.Memory())
		}
	}()
	t, err := m.copyTemplate(ctx, b, config, progress)
	if err != nil {
		return nil, err
	}
	log.step("template", "")
	log.offset = t.Millis
	if err := m.update(b, func(r *record) { r.Token = t.Token }); err != nil {
		return nil, err
	}
	config.Restore, config.Cmdline = b.dir.State(), cmdline(t.Token)
	return m.engine.Start(ctx, config)
}

// copyTemplate copies a template into a sandbox's folder.
func (m *Manager) copyTemplate(ctx context.Context, b *box, config vm.Config, progress func(api.Progress)) (template, error) {
	features, err := m.probe(ctx)
	if err != nil {
		return template{}, err
	}
	r := b.get()
	s := shape{
		Schema: templateSchema, Engine: features.Engine, EngineVersion: features.Version, Accelerator: features.Accelerator,
		MachineType: config.MachineType, Kernel: filepath.Base(config.Kernel), Initrd: filepath.Base(config.Initrd),
		Tools: filepath.Base(config.Disks[1].Path), CPUs: config.CPUs, MemoryMiB: config.MemoryMiB,
		DiskBytes: r.diskBytes(), Audio: config.Audio,
	}
	// One at a time: of two that need the same, one makes it and one finds it.
	m.templates.Lock()
	defer m.templates.Unlock()
	dir := m.store.Template(s.key())
	t, err := readTemplate(dir, s)
	if err != nil {
		progress(api.Progress{Step: "boot", Total: 2})
		if t, err = m.makeTemplate(ctx, dir, s, config); err != nil {
			return t, err
		}
	} else {
		progress(api.Progress{Step: "load", Total: 2})
	}
	for to, from := range map[string]string{b.dir.State(): dir.State(), b.dir.Memory(): dir.Memory()} {
		if err := store.Clone(to, from); err != nil {
			return t, err
		}
	}
	now := time.Now()
	os.Chtimes(dir.Record(), now, now) // when it was last used
	return t, nil
}

// readTemplate gives a template that is whole.
func readTemplate(dir store.Template, s shape) (template, error) {
	var t template
	if err := store.ReadRecord(dir.Record(), templateSchema, &t); err != nil {
		return t, err
	}
	if t.Shape != s {
		return t, errors.New("it is another shape's")
	}
	return t, first(hasSum(dir.State(), "state", t.StateSum), hasSum(dir.Memory(), "memory", t.MemorySum))
}

// makeTemplate boots a machine of the shape and saves it. Its folder appears whole or
// not at all.
func (m *Manager) makeTemplate(ctx context.Context, dir store.Template, s shape, config vm.Config) (t template, err error) {
	m.sweepTemplates(maxTemplates - 1)
	tmp := m.store.Template(newPrefix + randomHex(4))
	for _, d := range []string{tmp.Dir(), tmp.Machine()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return t, err
		}
	}
	defer m.dropTemplate(tmp)
	t = template{Schema: templateSchema, Shape: s, Token: randomHex(16)}
	config.Dir, config.Name, config.MemoryFile, config.ConsoleFile = tmp.Machine(), "template", tmp.Memory(), ""
	config.Cmdline = cmdline(t.Token)
	config.Disks = slices.Clone(config.Disks)
	config.Disks[0] = vm.Disk{Path: tmp.Disk(), Format: vm.Overlay}
	if err := m.engine.CreateDisk(ctx, tmp.Disk(), s.DiskBytes); err != nil {
		return t, err
	}
	machine, err := m.engine.Start(ctx, config)
	if err != nil {
		return t, err
	}
	defer machine.Kill()
	if t.Millis, err = awaitGuest(ctx, machine, t.Token); err != nil {
		return t, err
	}
	if err := machine.Pause(ctx); err != nil {
		return t, err
	}
	if err := machine.Save(ctx, tmp.State()); err != nil {
		return t, err
	}
	if err := first(machine.Kill(), os.Remove(tmp.Disk()), os.RemoveAll(tmp.Machine())); err != nil {
		return t, err
	}
	if t.StateSum, err = store.Sum(tmp.State()); err != nil {
		return t, err
	}
	if t.MemorySum, err = store.Sum(tmp.Memory()); err != nil {
		return t, err
	}
	if err := store.WriteRecord(tmp.Record(), t); err != nil {
		return t, err
	}
	// What is there already is not whole.
	if err := os.RemoveAll(dir.Dir()); err != nil {
		return t, err
	}
	return t, os.Rename(tmp.Dir(), dir.Dir())
}

// awaitGuest waits until a machine's guest answers, and tells how long it has run.
func awaitGuest(ctx context.Context, machine vm.Machine, token string) (millis int64, err error) {
	conn, err := machine.DialGuest(ctx)
	if err != nil {
		return 0, err
	}
	session, err := guest.Open(ctx, conn, token)
	if err != nil {
		conn.Close()
		return 0, err
	}
	defer session.Close()
	var stats guest.Stats
	err = session.Call(ctx, guest.OpStats, struct{}{}, &stats)
	return stats.UptimeMillis, err
}

// sweepTemplates removes what was left half made, and all but the keep templates that
// were used last.
func (m *Manager) sweepTemplates(keep int) {
	entries, _ := os.ReadDir(m.store.TemplatesDir())
	type used struct {
		dir store.Template
		at  time.Time
	}
	var all []used
	for _, e := range entries {
		dir := m.store.Template(e.Name())
		info, err := os.Stat(dir.Record())
		if strings.HasPrefix(e.Name(), newPrefix) || err != nil {
			m.dropTemplate(dir)
			continue
		}
		all = append(all, used{dir, info.ModTime()})
	}
	slices.SortFunc(all, func(a, b used) int { return b.at.Compare(a.at) })
	for _, t := range all[min(keep, len(all)):] {
		m.dropTemplate(t.dir)
	}
}

// dropTemplate removes a template, or what there is of one, and a machine that makes it.
func (m *Manager) dropTemplate(dir store.Template) {
	if err := m.engine.KillLeftover(dir.Machine()); err != nil && !errors.Is(err, vm.ErrNoMachine) {
		m.log.Warn("cannot end a template's machine", "error", err)
		return
	}
	if err := os.RemoveAll(dir.Dir()); err != nil {
		m.log.Warn("cannot remove a template", "error", err)
	}
}

package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
)

// A restore point is the root disk as it was, and with memory the running programs too.
// Its record and its memory are in a folder of the sandbox's; its disks are files beside
// the sandbox's own.

// point is point.json.
type point struct {
	Schema   int       `json:"schema"`
	ID       string    `json:"id"`
	Name     string    `json:"name,omitempty"`
	Note     string    `json:"note,omitempty"`
	Created  time.Time `json:"created"`
	Image    string    `json:"image"`
	ImageKey string    `json:"imageKey"`
	DiskGiB  int       `json:"diskGiB"`
	// Check says that the disk was kept from under a running system.
	Check bool `json:"check,omitempty"`
	// captured is the disks, and with memory all the rest of it.
	captured
}

const (
	pointSchema  = 1
	pointPrefix  = "rp-"
	maxPointName = 64   // characters
	maxPointNote = 1024 // likewise
)

// TakePoint keeps a sandbox as it is now.
func (m *Manager) TakePoint(ctx context.Context, req api.PointTakeRequest) (api.PointResult, error) {
	if utf8.RuneCountInString(req.Point) > maxPointName {
		return api.PointResult{}, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("a restore point's name has at most %d characters", maxPointName)}
	}
	if utf8.RuneCountInString(req.Note) > maxPointNote {
		return api.PointResult{}, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("a restore point's note has at most %d characters", maxPointNote)}
	}
	if strings.ContainsFunc(req.Point, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return api.PointResult{}, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("%q is no restore point's name: it holds control characters", req.Point)}
	}
	var result api.PointResult
	err := m.atPoints(ctx, req.Name, func(ctx context.Context, b *box) (err error) {
		points, err := m.points(b)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(points, func(p point) bool { return req.Point != "" && p.Name == req.Point }) {
			return &api.Error{Kind: api.KindExists, Message: fmt.Sprintf("sandbox %q already has a restore point named %q", b.name, req.Point), Hint: "see them with: doz point ls " + b.name}
		}
		began := time.Now()
		p, notes, err := m.takePoint(ctx, b, req)
		if err != nil {
			return cannot("keep", b.name, err)
		}
		result = api.PointResult{Sandbox: b.view(), Point: p.view(b.dir), Notes: notes, Millis: millis(began)}
		return nil
	})
	return result, err
}

// atPoints is a transition that has to do with restore points.
func (m *Manager) atPoints(ctx context.Context, name string, do func(context.Context, *box) error) error {
	b, err := m.get(name)
	if err != nil {
		return err
	}
	end, err := m.begin(ctx, b, "point", false)
	if err != nil {
		return err
	}
	defer end()
	return do(context.WithoutCancel(ctx), b)
}

// takePoint makes a point; its folder appears whole or not at all.
func (m *Manager) takePoint(ctx context.Context, b *box, req api.PointTakeRequest) (p point, notes []string, err error) {
	phase := b.phase()
	if req.Memory && !live(phase) && phase != api.Hibernated {
		return p, nil, &api.Error{Kind: api.KindPhase, Message: fmt.Sprintf("cannot keep the memory of sandbox %q: it is %s and has none", b.name, phase), Hint: "leave --memory out, to keep its disk"}
	}
	need := int64(saveRoom)
	if req.Memory {
		need += blocks(b.dir.Memory())
	}
	if err := m.room(need); err != nil {
		return p, nil, err
	}
	r := b.get()
	p = point{
		Schema: pointSchema, ID: pointPrefix + randomHex(4), Name: req.Point, Note: req.Note, Created: time.Now(),
		Image: r.Image, ImageKey: r.ImageKey, DiskGiB: r.DiskGiB, Check: (phase != api.Off && phase != api.Failed) || r.Check,
	}
	tmp := b.dir.Point(newPrefix + p.ID)
	if err := os.MkdirAll(tmp.Dir(), 0o700); err != nil {
		return p, nil, err
	}
	defer os.RemoveAll(tmp.Dir())
	notes, err = m.standStill(ctx, b, !req.Memory, func() (err error) {
		if req.Memory {
			p.captured, err = m.capture(ctx, b, tmp)
			return err
		}
		p.Disks, err = m.cover(ctx, b)
		return err
	})
	if err != nil {
		return p, notes, err
	}
	m.step(b, "point/kept")
	if req.Memory {
		if err := first(store.SyncFile(tmp.State()), store.SyncFile(tmp.Memory())); err != nil {
			return p, notes, err
		}
	}
	if err := store.WriteRecord(tmp.Record(), p); err != nil {
		return p, notes, err
	}
	m.step(b, "point/recorded")
	if err := os.Rename(tmp.Dir(), b.dir.Point(p.ID).Dir()); err != nil {
		return p, notes, err
	}
	return p, notes, store.SyncDir(b.dir.PointsDir())
}

// points are the sandbox's restore points, the oldest first.
func (m *Manager) points(b *box) ([]point, error) { return readPoints(b.dir) }

func readPoints(dir store.Sandbox) ([]point, error) {
	entries, err := os.ReadDir(dir.PointsDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("its restore points cannot be read: %w", err)
	}
	var points []point
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), pointPrefix) {
			continue
		}
		var p point
		if err := store.ReadRecord(dir.Point(e.Name()).Record(), pointSchema, &p); err != nil {
			return nil, fmt.Errorf("restore point %s is damaged: %w", e.Name(), err)
		}
		if p.ID != e.Name() || len(p.Disks) == 0 {
			return nil, fmt.Errorf("restore point %s is damaged", e.Name())
		}
		points = append(points, p)
	}
	slices.SortFunc(points, func(a, b point) int { return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.ID, b.ID)) })
	return points, nil
}

// Points lists a sandbox's restore points, with no host.
func Points(s *store.Store, name string) ([]api.Point, error) {
	if _, err := load(s, name); err != nil {
		return nil, err
	}
	points, err := readPoints(s.Sandbox(name))
	if err != nil {
		return nil, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot list the restore points of sandbox %q: %v", name, err)}
	}
	list := []api.Point{}
	for _, p := range points {
		list = append(list, p.view(s.Sandbox(name)))
	}
	return list, nil
}

func (p point) view(dir store.Sandbox) api.Point {
	v := api.Point{ID: p.ID, Name: p.Name, Note: p.Note, Created: p.Created, Memory: p.Snapshot != nil}
	if len(p.Disks) > 0 {
		v.Bytes = blocks(dir.File(p.Disks[0]))
	}
	v.Bytes += blocks(dir.Point(p.ID).Memory()) + blocks(dir.Point(p.ID).State())
	return v
}

// find gives the point that text means: its name, its id, or a beginning of either that
// is no other's.
func (m *Manager) find(b *box, text string) (point, error) {
	points, err := m.points(b)
	if err != nil {
		return point{}, err
	}
	var found []point
	for _, p := range points {
		if text == "" {
			continue // which begins every name, and names nothing
		}
		if p.Name == text || p.ID == text {
			return p, nil
		}
		if strings.HasPrefix(p.Name, text) || strings.HasPrefix(p.ID, text) {
			found = append(found, p)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return point{}, &api.Error{Kind: api.KindNotFound, Message: fmt.Sprintf("sandbox %q has no restore point %q", b.name, text), Hint: "see them with: doz point ls " + b.name}
	}
	var which []string
	for _, p := range found {
		which = append(which, strings.TrimSpace(p.ID+" "+p.Name))
	}
	return point{}, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("%q may be any of these restore points of sandbox %q: %s", text, b.name, strings.Join(which, ", "))}
}

// FindPoint shows the point that text means.
func (m *Manager) FindPoint(name, text string) (api.Point, error) {
	b, err := m.get(name)
	if err != nil {
		return api.Point{}, err
	}
	p, err := m.find(b, text)
	if err != nil {
		return api.Point{}, cannot("look at", name, err)
	}
	return p.view(b.dir), nil
}

// beforeRevert names the point that a revert takes first.
const beforeRevert = "before revert"

// Revert puts a sandbox back to a restore point, having kept it as it is now. It is off
// then, or, when the point has memory, hibernated as of that instant.
func (m *Manager) Revert(ctx context.Context, req api.PointRequest) (api.PointResult, error) {
	var result api.PointResult
	err := m.atPoints(ctx, req.Name, func(ctx context.Context, b *box) error {
		p, err := m.find(b, req.Point)
		if err != nil {
			return cannot("revert", b.name, err)
		}
		began := time.Now()
		if err := m.revertible(b, p); err != nil {
			return cannot("revert", b.name, err)
		}
		if phase := b.phase(); live(phase) || phase == api.Hibernated {
			if err := m.shutdown(ctx, b); err != nil {
				return cannot("revert", b.name, err)
			}
		}
		note := "as it was before " + cmp.Or(p.Name, p.ID)
		before, notes, err := m.takePoint(ctx, b, api.PointTakeRequest{Note: note, Point: m.unusedName(b, beforeRevert)})
		if err == nil {
			err = m.revert(ctx, b, p)
		}
		if err != nil {
			return cannot("revert", b.name, err)
		}
		result = api.PointResult{Sandbox: b.view(), Point: before.view(b.dir), Notes: notes, Millis: millis(began)}
		return nil
	})
	return result, err
}

// unusedName is name, or it with a number that no point has.
func (m *Manager) unusedName(b *box, name string) string {
	points, _ := m.points(b)
	for n := 1; ; n++ {
		try := name
		if n > 1 {
			try = fmt.Sprintf("%s %d", name, n)
		}
		if !slices.ContainsFunc(points, func(p point) bool { return p.Name == try }) {
			return try
		}
	}
}

// revertible refuses, while nothing is lost yet, a revert that cannot succeed.
func (m *Manager) revertible(b *box, p point) error {
	if err := b.coverable(); err != nil {
		return err
	}
	dir := b.dir.Point(p.ID)
	if err := m.room(blocks(dir.Memory()) + blocks(dir.State()) + saveRoom); err != nil {
		return err
	}
	return p.whole(b.dir)
}

// whole refuses a point that is not what was kept.
func (p point) whole(of store.Sandbox) error {
	for _, file := range p.Disks {
		if _, err := os.Stat(of.File(file)); err != nil {
			return fmt.Errorf("the disk of restore point %s cannot be read: %w", p.ID, errors.Unwrap(err))
		}
	}
	if p.Snapshot == nil {
		return nil
	}
	dir := of.Point(p.ID)
	err := hasSum(dir.State(), "state", p.Snapshot.StateSum)
	if err == nil {
		err = hasSum(dir.Memory(), "memory", p.Snapshot.MemorySum)
	}
	if err != nil {
		return fmt.Errorf("restore point %s is damaged: %w", p.ID, err)
	}
	return nil
}

// revert makes a sandbox that is off what the point is. What it made in vain is removed.
func (m *Manager) revert(ctx context.Context, b *box, p point) (err error) {
	defer func() {
		if err != nil {
			b.clean()
		}
		m.sweepDisks(b)
	}()
	name := store.LaterDisk(randomHex(4))
	if err := m.engine.CreateDisk(ctx, b.dir.File(name), int64(p.DiskGiB)<<30); err != nil {
		return err
	}
	seal := p.Snapshot
	if seal != nil {
		seal = seal.over(b.dir.File(name))
		dir := b.dir.Point(p.ID)
		for to, from := range map[string]string{b.dir.State(): dir.State(), b.dir.Memory(): dir.Memory()} {
			os.Remove(to)
			if err := first(store.Clone(to, from), store.SyncFile(to)); err != nil {
				return err
			}
		}
	}
	m.step(b, "revert/made")
	err = m.update(b, func(r *record) {
		r.Disks = append([]string{name}, p.Disks...)
		r.Image, r.ImageKey, r.DiskGiB, r.Check, r.Problem, r.Died = p.Image, p.ImageKey, p.DiskGiB, p.Check, "", false
		if r.Snapshot = seal; seal != nil {
			r.Phase, r.Tools, r.Token = api.Hibernated, p.Tools, p.Token
		}
	})
	m.step(b, "revert/recorded")
	return err
}

// RemovePoint removes a restore point. What others share of it stays.
func (m *Manager) RemovePoint(ctx context.Context, req api.PointRequest) (api.Point, error) {
	var v api.Point
	err := m.atPoints(ctx, req.Name, func(_ context.Context, b *box) error {
		p, err := m.find(b, req.Point)
		if err != nil {
			return cannot("remove a restore point of", b.name, err)
		}
		v = p.view(b.dir)
		trash := b.dir.Point(trashPrefix + p.ID).Dir()
		if err := os.Rename(b.dir.Point(p.ID).Dir(), trash); err != nil {
			return cannot("remove a restore point of", b.name, err)
		}
		m.step(b, "point/unnamed")
		os.RemoveAll(trash)
		m.sweepDisks(b)
		return nil
	})
	return v, err
}

// ForkPoint makes a new sandbox of a restore point: off, or hibernated as of that
// instant when the point has memory.
func (m *Manager) ForkPoint(ctx context.Context, req api.PointForkRequest) (api.Sandbox, error) {
	if !api.ValidName(req.New) {
		return api.Sandbox{}, badName(req.New)
	}
	var v api.Sandbox
	err := m.atPoints(ctx, req.Name, func(ctx context.Context, b *box) error {
		p, err := m.find(b, req.Point)
		if err != nil {
			return cannot("fork a restore point of", b.name, err)
		}
		r := b.get().copyAs(req.New)
		r.Image, r.ImageKey, r.DiskGiB, r.Check = p.Image, p.ImageKey, p.DiskGiB, p.Check
		dir := b.dir.Point(p.ID)
		err = m.room(blocks(dir.Memory()) + blocks(dir.State()) + saveRoom)
		if err == nil {
			err = p.whole(b.dir)
		}
		if err != nil {
			return cannot("fork a restore point of", b.name, err)
		}
		v, err = m.make(r, func(tmp store.Sandbox, r *record) error {
			if p.Snapshot != nil {
				return m.fill(ctx, tmp, r, b.dir, dir, p.captured, store.Clone, true)
			}
			return m.putOver(ctx, tmp, b.dir, r, p.Disks)
		})
		return err
	})
	return v, err
}

// UsesImage says whether a sandbox or a restore point stands on an image's version,
// whose key begins so.
func (m *Manager) UsesImage(name, key string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.boxes {
		if r := b.get(); r.Image == name && strings.HasPrefix(r.ImageKey, key) {
			return true
		}
		points, err := m.points(b)
		if err != nil {
			return true // it cannot be told
		}
		for _, p := range points {
			if p.Image == name && strings.HasPrefix(p.ImageKey, key) {
				return true
			}
		}
	}
	return false
}

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/store"
)

// The screens of a sandbox's sessions are saved before it comes to rest, to be looked at
// while it rests. They last as long as it can go on.

const (
	// screensDeadline is how long saving all of them may hold up coming to rest; those
	// that were not reached by then stay as they were saved last.
	screensDeadline = 3 * time.Second
	// settleTime is what a program that was just started is given before it is saved, so
	// that it is not caught half begun.
	settleTime = 3 * time.Second

	screenSchema = 1
)

// savedScreen is one session in screens/.
type savedScreen struct {
	Schema  int         `json:"schema"`
	Session api.Session `json:"session"`
	Screen  api.Screen  `json:"screen"`
}

// saveScreens saves the screen of each session of a running sandbox. It gives what is
// to be told of it, and with settle waits for programs that began just now.
func (m *Manager) saveScreens(ctx context.Context, b *box, settle bool) (notes []string) {
	if b.sessionless() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, screensDeadline+settleTime)
	defer cancel()
	var list guest.SessionList
	if err := m.askSession(ctx, b, guest.OpSessionList, struct{}{}, &list); err != nil {
		return []string{"the screens of its sessions were not saved: " + err.Error()}
	}
	b.mu.Lock()
	b.noSessions = len(list.Sessions) == 0
	b.mu.Unlock()
	if settle {
		settleSessions(ctx, list.Sessions)
	}
	if err := m.writeScreens(ctx, b, list.Sessions); err != nil {
		return []string{"not every session's screen was saved: " + err.Error()}
	}
	return nil
}

// settleSessions waits until the youngest program has had its time.
func settleSessions(ctx context.Context, list []guest.SessionInfo) {
	var wait time.Duration
	for _, s := range list {
		// The guest's clock may be anything, so the wait is bounded.
		if left := settleTime - time.Since(time.Unix(0, s.StartedUnixNanos)); s.Exit == nil && left <= settleTime {
			wait = max(wait, left)
		}
	}
	select {
	case <-time.After(wait):
	case <-ctx.Done():
	}
}

func (m *Manager) writeScreens(ctx context.Context, b *box, list []guest.SessionInfo) error {
	if err := os.MkdirAll(b.dir.ScreensDir(), 0o700); err != nil {
		return err
	}
	var errs []error
	var names []string
	for _, s := range list {
		if !api.ValidName(s.Session) {
			continue // the guest says it, so it may be anything
		}
		names = append(names, s.Session)
		var screen guest.SessionScreen
		err := m.askSession(ctx, b, guest.OpSessionScreen, guest.SessionName{Session: s.Session}, &screen)
		if err == nil {
			err = store.WriteRecord(b.dir.Screen(s.Session), savedScreen{
				Schema: screenSchema, Session: sessionView(s), Screen: api.Screen{Text: string(screen.Text), VT: screen.VT},
			})
		}
		errs = append(errs, err)
	}
	entries, _ := os.ReadDir(b.dir.ScreensDir())
	for _, e := range entries {
		if name := strings.TrimSuffix(e.Name(), ".json"); !slices.Contains(names, name) {
			os.Remove(filepath.Join(b.dir.ScreensDir(), e.Name()))
		}
	}
	return errors.Join(errs...)
}

// sessionless says whether the guest is known to have no sessions.
func (b *box) sessionless() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.noSessions
}

// SavedSessions lists the sessions of a sandbox that does not run, or shows one, as they
// were saved when it came to rest. It needs no host.
func SavedSessions(s *store.Store, r api.SessionsRequest) (api.SessionList, error) {
	list := api.SessionList{Sessions: []api.Session{}}
	if _, err := load(s, r.Name); err != nil {
		return list, err
	}
	dir := s.Sandbox(r.Name)
	entries, _ := os.ReadDir(dir.ScreensDir())
	for _, e := range entries {
		name, isScreen := strings.CutSuffix(e.Name(), ".json")
		if !isScreen || r.Screen != "" && r.Screen != name {
			continue
		}
		var saved savedScreen
		if err := store.ReadRecord(dir.Screen(name), screenSchema, &saved); err != nil {
			return list, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot show session %q of sandbox %q: %v", name, r.Name, err)}
		}
		saved.Session.Clients = 0
		list.Sessions = append(list.Sessions, saved.Session)
		if r.Screen != "" {
			list.Screen = &saved.Screen
		}
	}
	if r.Screen != "" && list.Screen == nil {
		return list, noSession(r.Name, r.Screen)
	}
	return list, nil
}

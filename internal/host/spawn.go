package host

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"dozable.com/doz/internal/store"
)

// maxLog is the size at which a new host begins its log anew, keeping one old.
const maxLog = 4 << 20

// Spawn starts a detached host of the store: its own session, no terminal, none of
// our descriptors, its output in <store>/host.log. It returns when the process
// runs; whether it answers is for the caller to find out.
func Spawn(s *store.Store, executable string, args ...string) (*os.Process, error) {
	if err := s.Make(); err != nil {
		return nil, err
	}
	if info, err := os.Stat(s.Log()); err == nil && info.Size() > maxLog {
		os.Rename(s.Log(), s.Log()+".old")
	}
	log, err := os.OpenFile(s.Log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot start the host of store %s: %w", s.Root(), err)
	}
	defer log.Close()
	cmd := exec.Command(executable, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot start the host of store %s: %w", s.Root(), err)
	}
	// Reaped if it ends while this process still lives; adopted by init otherwise.
	go cmd.Wait()
	return cmd.Process, nil
}

// LastWords is the last line a host wrote before it gave up.
func LastWords(s *store.Store) string {
	data, err := os.ReadFile(s.Log())
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return lines[len(lines)-1]
}

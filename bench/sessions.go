package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// ptyYardstick reads the same output from a terminal with nothing between, in the
// guest: what its kernel's terminals and its processor can do.
const ptyYardstick = `
import os, pty, time
pid, fd = pty.fork()
if pid == 0: os.execvp("cat", ["cat", "/tmp/bench-lines"])
began = time.time()
try:
    while os.read(fd, 65536): pass
except OSError: pass
print(time.time() - began)
`

// sessionAmount is how much a session prints, in MB.
const sessionAmount = 50

// sessions measures what it is like to sit at a session.
func (b *bench) sessions(string) error {
	if _, err := b.doz("run", "a1", "-d", "--session", "drawn", "--", "sh", "-c", "seq 5000; echo drawn; read x"); err != nil {
		return err
	}
	drawn, err := median(20, func() error {
		s, err := b.attach("attach", "a1", "drawn")
		if err != nil {
			return err
		}
		defer s.leave()
		return s.until("drawn")
	})
	if err != nil {
		return err
	}
	b.add(figure{Name: "attach to a screen drawn", Value: drawn, Unit: "ms", Aim: 50})
	if err := b.echo(); err != nil {
		return err
	}
	return b.output()
}

// echo measures a key's way to the terminal and back.
func (b *bench) echo() error {
	s, err := b.attach("run", "a1", "--", "cat")
	if err != nil {
		return err
	}
	defer s.leave()
	// What draws the screen comes first, and has no tilde.
	io.WriteString(s.in, "~")
	if err := s.until("~"); err != nil {
		return err
	}
	n := 0
	ms, err := median(50, func() error {
		n++
		key := string(rune('a' + n%26))
		if _, err := io.WriteString(s.in, key); err != nil {
			return err
		}
		return s.until(key)
	})
	if err == nil {
		b.add(figure{Name: "key to its echo", Value: ms, Unit: "ms", Aim: 15})
	}
	return err
}

func (b *bench) output() error {
	make := fmt.Sprintf("yes 'the quick brown fox jumps over the lazy dog and so on' | head -c %d000000 >/tmp/bench-lines", sessionAmount)
	if _, err := b.doz("exec", "a1", "--", "sh", "-c", make); err != nil {
		return err
	}
	out, err := b.doz("exec", "a1", "--", "python3", "-c", ptyYardstick)
	if err != nil {
		return err
	}
	var bare float64
	fmt.Sscan(out, &bare)
	began := time.Now()
	if _, err := b.doz("run", "a1", "--", "cat", "/tmp/bench-lines"); err != nil {
		return err
	}
	b.add(figure{
		Name: "output through attach", Value: sessionAmount / time.Since(began).Seconds(), Unit: "MB/s", Aim: 20,
		Yardstick: "a bare terminal in the guest", Against: sessionAmount / max(bare, 0.001),
	})
	return nil
}

// sitting is a client at a session.
type sitting struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (b *bench) attach(args ...string) (*sitting, error) {
	cmd := exec.Command(b.program, args...)
	cmd.Env = append(os.Environ(), "DOZ_STORE="+b.store, "DOZ_PARTS=")
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &sitting{cmd, in, bufio.NewReaderSize(out, 256<<10)}, cmd.Start()
}

// until reads until text has arrived.
func (s *sitting) until(text string) error {
	var seen []byte
	for !bytes.HasSuffix(seen, []byte(text)) {
		c, err := s.out.ReadByte()
		if err != nil {
			return fmt.Errorf("%s was not shown: %w", strings.TrimSpace(text), err)
		}
		seen = append(seen, c)
	}
	return nil
}

func (s *sitting) leave() {
	io.WriteString(s.in, "\x1d")
	io.Copy(io.Discard, s.out)
	s.cmd.Wait()
}

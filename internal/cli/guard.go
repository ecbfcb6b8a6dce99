package cli

import (
	"io"
	"os"
	"os/exec"
	"syscall"

	"github.com/spf13/cobra"
	xterm "golang.org/x/term"
)

// guardWord is the hidden command that gives a terminal back when the doz that used
// it was killed.
const guardWord = "guard-terminal"

// guard starts a process that gives the terminal back should this one be killed. The
// function it gives lets it go.
func guard(in, screen *os.File) func() {
	exe, err := os.Executable()
	if err != nil {
		return func() {}
	}
	r, w, err := os.Pipe()
	if err != nil {
		return func() {}
	}
	cmd := exec.Command(exe, guardWord, settings(in))
	cmd.Stdin, cmd.Stdout = r, screen
	cmd.ExtraFiles = []*os.File{in}
	// Of its own session, so that what ends this one's does not end it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	r.Close()
	if err != nil {
		w.Close()
		return func() {}
	}
	state := make(chan struct{})
	go func() {
		cmd.Wait()
		close(state)
	}()
	return func() {
		w.Write([]byte{1})
		w.Close()
		<-state
	}
}

// guardTerminal waits for the end of its input. A byte before it is a proper leave.
func (a *app) guardTerminal() *cobra.Command {
	return &cobra.Command{
		Use: guardWord, Hidden: true, Args: args(1, 1, guardWord),
		RunE: func(_ *cobra.Command, words []string) error {
			in := os.NewFile(3, "terminal")
			if !xterm.IsTerminal(int(in.Fd())) {
				return nil
			}
			if n, _ := io.ReadFull(os.Stdin, make([]byte, 1)); n > 0 {
				return nil
			}
			if screen := a.screen(); screen != nil {
				_, rows, _ := xterm.GetSize(int(screen.Fd()))
				screen.Write(farewell(max(rows, 1), true, true))
			}
			dropInput(in)
			return set(in, words[0])
		},
	}
}

// Command deckhold is the guest's first program. As PID 1 it brings the machine up
// from the initramfs and serves the host on the guest channel; under other names and
// words it does single jobs that the host has it run (deckhold unpack, …).
//
// It must not know what a sandbox is for, and must run in any Linux root, one with
// nothing but a shell included.
package main

import (
	"fmt"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// version is set by the linker.
var version = "dev"

func main() {
	if os.Getpid() != 1 {
		os.Exit(job(os.Args[1:]))
	}
	// Memory is the guest's; a little more collecting costs less than 10 MiB.
	debug.SetGCPercent(25)
	run()
}

// job does one of the single jobs and gives its exit code.
func job(args []string) int {
	jobs := map[string]func([]string) error{"mkroot": mkroot, "unpack": unpack, "seal": seal}
	if len(args) == 0 || jobs[args[0]] == nil {
		fmt.Fprintln(os.Stderr, "deckhold "+version+": usage: deckhold mkroot|unpack|seal")
		return 64
	}
	if err := jobs[args[0]](args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 65
	}
	return 0
}

// run is PID 1's life. It ends with the machine.
func run() {
	params := mountBasics()
	m := &machine{steps: &steps{}, up: make(chan struct{}), root: params["doz.root"], tools: params["doz.tools"]}
	m.steps.done("kernel", "")
	m.reaper = startReaper()
	os.MkdirAll("/run/doz/bin", 0o755)
	mount("/doz/bin", "/run/doz/bin", "", unix.MS_BIND, "")
	m.mountTools()
	if m.root == "" {
		// A builder: nothing more is to come.
		m.raise(false)
	}
	go func() {
		if err := serve(m, params[guest.TokenParam]); err != nil {
			fmt.Fprintln(os.Stderr, "deckhold: the guest channel failed:", err)
		}
	}()
	watchPowerButton(m)
	select {} // PID 1 must not return
}

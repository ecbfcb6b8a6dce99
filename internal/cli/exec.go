package cli

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
	"dozable.com/doz/internal/guest"
)

// execTimeout is how long a program may run when nobody says.
const execTimeout = 120 * time.Second

// execResult is exec's JSON.
type execResult struct {
	ExitCode   int    `json:"exitCode"`
	Signal     string `json:"signal,omitempty"`
	TimedOut   bool   `json:"timedOut,omitempty"`
	Stdout     string `json:"stdout"`
	Stderr     string `json:"stderr"`
	Started    bool   `json:"started"`
	Woke       bool   `json:"woke"`
	BootMillis int64  `json:"bootMilliseconds"`
}

func (a *app) exec() *cobra.Command {
	r := api.ExecRequest{}
	var env []string
	var timeout float64
	cmd := &cobra.Command{
		Use: "exec NAME -- PROGRAM [ARG...]", Short: "Run a program in a sandbox, without a terminal",
		Long: `Run a program in a sandbox, without a terminal. The sandbox is started or woken first. Standard input, output and error are passed on untouched, Ctrl-C and other
signals reach the program, and its exit code is doz's; 125 is a failure of doz's own,
2 and 3 a sandbox that is not there or is in the wrong phase. Options may stand before
or after NAME; everything after -- is the program's.`,
		Example: "  doz exec a1 -- python3 -c 'print(1)'\n  cat script | doz exec a1 -- sh\n  doz exec a1 -e LANG=C --workdir /tmp -- ls",
		Args:    args(2, -1, "exec NAME -- PROGRAM [ARG...]"), ValidArgsFunction: a.completeSandbox,
		RunE: func(cmd *cobra.Command, words []string) error {
			if err := name(words[0]); err != nil {
				return err
			}
			r.Name, r.Argv = words[0], words[1:]
			var err error
			if r.Env, err = variables(env); err != nil {
				return err
			}
			if !(timeout >= 0 && timeout <= 1e9) { // not a number either
				return &api.Error{Kind: api.KindUsage, Message: "--timeout must be seconds, or 0 for none"}
			}
			// Upwards: a time-out of next to nothing is not none.
			r.TimeoutMillis = int64(math.Ceil(timeout * 1000))
			return a.runExec(r)
		},
	}
	f := cmd.Flags()
	f.StringArrayVarP(&env, "env", "e", nil, "set a variable, NAME=value (or NAME, for its value here)")
	f.StringVar(&r.User, "user", "", "user to run as: name or number, with :group if wanted (default root)")
	f.StringVar(&r.Workdir, "workdir", "", "folder to run in (default the user's home)")
	f.Float64Var(&timeout, "timeout", execTimeout.Seconds(), "seconds after which the program and all it started are ended; 0 is never")
	f.BoolVar(&r.NoStart, "no-start", false, "fail when the sandbox is off")
	f.BoolVar(&r.NoWake, "no-wake", false, "fail when the sandbox is paused, asleep or hibernated")
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return &api.Error{Kind: api.KindUsage, Message: err.Error(), Hint: "the program's own options stand after --: doz exec NAME -- PROGRAM [ARG...]"}
	})
	return cmd
}

// runExec runs the program with this process's streams and signals as its own.
func (a *app) runExec(r api.ExecRequest) error {
	// Not interruptible: the program is, and ends this with its own code.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	names := make(chan string, 8)
	received := make(chan os.Signal, 8)
	signal.Notify(received, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(received)
	running := make(chan struct{})
	go forward(received, names, running, cancel)

	steps := a.steps("start " + r.Name)
	defer steps.end()
	c, err := a.connect(ctx, steps.show)
	if err != nil {
		return err
	}
	streams := client.IO{Stdout: a.out, Stderr: a.err, Signals: names}
	if f, ok := a.in.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
		streams.Stdin = a.in
	}
	var out, errs bytes.Buffer
	if a.json {
		streams.Stdout, streams.Stderr = &out, &errs
	}
	var result api.ExecResult
	status, err := c.Exec(ctx, r, streams, func(started api.ExecResult) {
		steps.end()
		result = started
		if !a.json {
			a.notes(started.Notes)
		}
		close(running)
	})
	if err != nil {
		if ctx.Err() != nil {
			return exitCode(130)
		}
		return err
	}
	return a.finishExec(status, result, out.String(), errs.String())
}

func (a *app) finishExec(status guest.ExitStatus, result api.ExecResult, out, errs string) error {
	if a.json {
		err := a.print(execResult{
			ExitCode: status.Code, Signal: status.Signal, TimedOut: status.TimedOut, Stdout: out, Stderr: errs,
			Started: result.Started, Woke: result.Woke, BootMillis: result.BootMillis,
		}, nil)
		if err != nil {
			return err
		}
	} else if status.TimedOut {
		fmt.Fprintln(a.err, "doz: the program's time ran out; it was ended with all it had started")
	}
	if status.Code != 0 {
		return exitCode(status.Code)
	}
	return nil
}

// forward sends signals to the program once it runs; before, one is enough to leave.
func forward(received <-chan os.Signal, names chan<- string, running <-chan struct{}, leave func()) {
	for s := range received {
		select {
		case <-running:
			names <- map[os.Signal]string{syscall.SIGINT: "INT", syscall.SIGTERM: "TERM", syscall.SIGHUP: "HUP", syscall.SIGQUIT: "QUIT"}[s]
		default:
			leave()
		}
	}
}

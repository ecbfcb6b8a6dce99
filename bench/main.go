// Command bench measures doz on real machines and prints each figure beside its
// yardstick of the same run, and all of them as JSON. It asserts nothing: how fast a
// computer is on a given day is no property of the program.
//
// It wants DOZ_PARTS and DOZ_LAB_TAR, as make bench sets them.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dozable.com/doz/internal/api"
)

// figure is one thing measured: the median of its runs.
type figure struct {
	Name      string  `json:"name"`
	Value     float64 `json:"value"`
	Unit      string  `json:"unit"`
	Aim       float64 `json:"aim"` // what docs promise; 0 when nothing is
	Yardstick string  `json:"yardstick,omitempty"`
	Against   float64 `json:"against,omitempty"` // the yardstick's own value
}

type bench struct {
	program, store string
	figures        []figure
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	partsDir, lab := os.Getenv("DOZ_PARTS"), os.Getenv("DOZ_LAB_TAR")
	if partsDir == "" || lab == "" {
		return errors.New("DOZ_PARTS and DOZ_LAB_TAR are not set; run it by: make bench")
	}
	dir, err := os.MkdirTemp("", "doz-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := &bench{program: filepath.Join(partsDir, "doz"), store: filepath.Join(dir, "store")}
	defer b.doz("host", "stop")
	for _, step := range []func(string) error{b.imports, b.boots, b.execs, b.bytes, b.sessions, b.many, b.sizes, b.rests, b.copies, b.shapes} {
		if err := step(lab); err != nil {
			return err
		}
	}
	return b.print()
}

// doz runs a command and gives its output.
func (b *bench) doz(args ...string) (string, error) {
	cmd := exec.Command(b.program, args...)
	cmd.Env = append(os.Environ(), "DOZ_STORE="+b.store, "DOZ_PARTS=")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("doz %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return string(out), err
}

// median runs f some times and gives the median of what it took, in milliseconds.
func median(runs int, f func() error) (float64, error) {
	var took []time.Duration
	for range runs {
		began := time.Now()
		if err := f(); err != nil {
			return 0, err
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return float64(took[len(took)/2].Microseconds()) / 1000, nil
}

func (b *bench) add(f figure) {
	b.figures = append(b.figures, f)
	fmt.Fprintf(os.Stderr, "%-40s %9.1f %s\n", f.Name, f.Value, f.Unit)
}

func (b *bench) imports(lab string) error {
	ms, err := median(1, func() error { _, err := b.doz("image", "import", "lab", lab); return err })
	if err == nil {
		b.add(figure{Name: "import of the lab image", Value: ms / 1000, Unit: "s"})
	}
	return err
}

// boots measures the cold start, beside bare machines: the same engine and kernel with
// no disks, nothing checked and nothing recorded.
func (b *bench) boots(string) error {
	printing, deckhold, err := bareBoots()
	if err != nil {
		return err
	}
	b.add(figure{Name: "bare machine to deckhold's answer", Value: deckhold, Unit: "ms", Yardstick: "an init that only prints", Against: printing})
	ms, err := median(5, func() error { _, err := b.doz("create", fmt.Sprintf("c%d", time.Now().UnixNano())); return err })
	if err != nil {
		return err
	}
	b.add(figure{Name: "create", Value: ms, Unit: "ms", Aim: 100})
	if _, err := b.doz("create", "a1"); err != nil {
		return err
	}
	first, err := median(1, func() error { _, err := b.doz("exec", "a1", "--", "true"); return err })
	if err != nil {
		return err
	}
	b.add(figure{Name: "first start ever to exec's answer", Value: first, Unit: "ms", Aim: 1600, Yardstick: "an init that only prints", Against: printing})
	var took []float64
	for range 5 {
		if _, err := b.doz("shutdown", "--yes", "a1"); err != nil {
			return err
		}
		ms, err := median(1, func() error { _, err := b.doz("exec", "a1", "--", "true"); return err })
		if err != nil {
			return err
		}
		took = append(took, ms)
	}
	slices.Sort(took)
	b.add(figure{Name: "cold start to exec's answer", Value: took[2], Unit: "ms", Aim: min(1600, printing+500), Yardstick: "an init that only prints", Against: printing})
	return b.touched("guest memory touched after a boot", 90)
}

func (b *bench) execs(string) error {
	native, err := median(20, func() error { return exec.Command("true").Run() })
	if err != nil {
		return err
	}
	ms, err := median(40, func() error { _, err := b.doz("exec", "a1", "--", "true"); return err })
	if err != nil {
		return err
	}
	b.add(figure{Name: "exec true, at the command line", Value: ms, Unit: "ms", Aim: 15, Yardstick: "true on this computer", Against: native})
	return nil
}

// amount is how much is sent each way, in MiB.
const amount = 256

func (b *bench) bytes(string) error {
	rate := func(name string, aim float64, in io.Reader, args ...string) error {
		cmd := exec.Command(b.program, args...)
		cmd.Env = append(os.Environ(), "DOZ_STORE="+b.store)
		cmd.Stdin = in
		began := time.Now()
		if err := cmd.Run(); err != nil {
			return err
		}
		b.add(figure{Name: name, Value: amount * 1.048576 / time.Since(began).Seconds(), Unit: "MB/s", Aim: aim})
		return nil
	}
	if err := rate("exec output", 60, nil, "exec", "a1", "--", "dd", "if=/dev/zero", "bs=1M", fmt.Sprintf("count=%d", amount), "status=none"); err != nil {
		return err
	}
	return rate("exec input", 0, io.LimitReader(zeros{}, amount<<20), "exec", "a1", "--", "dd", "of=/dev/null", "bs=1M", "status=none")
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func (b *bench) many(string) error {
	for i := range 500 {
		if _, err := b.doz("create", fmt.Sprintf("many-%d", i)); err != nil {
			return err
		}
	}
	ms, err := median(5, func() error { _, err := b.doz("ls", "--json"); return err })
	if err == nil {
		b.add(figure{Name: "ls of 500 sandboxes", Value: ms, Unit: "ms", Aim: 100})
	}
	return err
}

func (b *bench) sizes(string) error {
	out, err := b.doz("host", "status", "--json")
	if err != nil {
		return err
	}
	var status api.Status
	if err := json.Unmarshal([]byte(out), &status); err != nil {
		return err
	}
	b.add(figure{Name: "host's memory", Value: rss(status.PID), Unit: "MB", Aim: 40})
	if err := b.touched("guest memory touched in the end", 0); err != nil {
		return err
	}
	if out, err = b.doz("exec", "a1", "--", "grep", "VmRSS", "/proc/1/status"); err != nil {
		return err
	}
	var kib float64
	fmt.Sscanf(strings.TrimSpace(strings.TrimPrefix(out, "VmRSS:")), "%f", &kib)
	b.add(figure{Name: "of it deckhold's", Value: kib / 1024, Unit: "MiB", Aim: 15})
	return nil
}

// touched adds how much of the machine's memory takes room on this computer now.
func (b *bench) touched(name string, aim float64) error {
	out, err := b.doz("inspect", "a1")
	if err != nil {
		return err
	}
	var v api.Sandbox
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		return err
	}
	b.add(figure{Name: name, Value: float64(v.MemoryBytes) / (1 << 20), Unit: "MiB", Aim: aim})
	return nil
}

// rss is a process's memory in MB.
func rss(pid int) float64 {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			var kib float64
			fmt.Sscanf(strings.TrimSpace(rest), "%f", &kib)
			return kib / 1000
		}
	}
	return 0
}

// print prints the figures for people, then as JSON.
func (b *bench) print() error {
	fmt.Println()
	for _, f := range b.figures {
		line := fmt.Sprintf("%-36s %9.1f %-5s", f.Name, f.Value, f.Unit)
		if f.Aim > 0 {
			line += fmt.Sprintf("  aim %g", f.Aim)
		}
		if f.Against > 0 {
			line += fmt.Sprintf("  %.2f × %s (%.1f)", f.Value/f.Against, f.Yardstick, f.Against)
		}
		fmt.Println(line)
	}
	e := json.NewEncoder(os.Stdout)
	e.SetIndent("", "  ")
	return e.Encode(b.figures)
}

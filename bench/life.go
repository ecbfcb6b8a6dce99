package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"dozable.com/doz/internal/api"
)

// rounds is how often each transition is measured.
const rounds = 7

// took runs a transition and gives how long the host took for it, in milliseconds, and
// the snapshot's size in MiB where there is one.
func (b *bench) took(args ...string) (millis, mib float64, err error) {
	out, err := b.doz(append(args, "--json")...)
	if err != nil {
		return 0, 0, err
	}
	var t struct {
		api.Transition
		BootMillis float64 `json:"bootMilliseconds"`
	}
	if err := json.Unmarshal([]byte(out), &t); err != nil {
		return 0, 0, err
	}
	if s := t.Sandbox.Snapshot; s != nil {
		mib = float64(s.Bytes) / (1 << 20)
	}
	return max(t.Millis, t.BootMillis), mib, nil
}

// middle is the median.
func middle(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// series measures transitions one after another, some rounds of all of them.
func (b *bench) series(name string, ops []string, aims map[string]float64, note string) error {
	all := map[string][]float64{}
	for range rounds {
		for _, op := range ops {
			ms, mib, err := b.took(op, name)
			if err != nil {
				return err
			}
			all[op] = append(all[op], ms)
			if mib > 0 {
				all[op+" size"] = append(all[op+" size"], mib)
			}
		}
	}
	for _, op := range ops {
		b.add(figure{Name: op + note, Value: middle(all[op]), Unit: "ms", Aim: aims[op]})
	}
	if sizes := all["hibernate size"]; sizes != nil {
		b.add(figure{Name: "snapshot" + note, Value: middle(sizes), Unit: "MiB", Aim: aims["size"]})
	}
	return nil
}

// rests measures coming to rest and going on, of an idle sandbox with the defaults.
func (b *bench) rests(string) error {
	if err := b.restart("a1"); err != nil {
		return err
	}
	if err := b.series("a1", []string{"pause", "resume"}, map[string]float64{"pause": 2, "resume": 2}, ", in the host"); err != nil {
		return err
	}
	if err := b.series("a1", []string{"sleep", "wake"}, map[string]float64{"sleep": 80, "wake": 5}, " in place, in the host"); err != nil {
		return err
	}
	if err := b.series("a1", []string{"hibernate", "wake"}, map[string]float64{"hibernate": 150, "wake": 250, "size": 66}, " to disk, in the host"); err != nil {
		return err
	}
	var back []float64
	for range rounds {
		if _, err := b.doz("hibernate", "a1"); err != nil {
			return err
		}
		ms, err := median(1, func() error { _, err := b.doz("exec", "a1", "--", "true"); return err })
		if err != nil {
			return err
		}
		back = append(back, ms)
	}
	b.add(figure{Name: "hibernated to exec's answer", Value: middle(back), Unit: "ms", Aim: 250})
	return nil
}

// restart gives a sandbox a machine whose memory nothing has filled yet.
func (b *bench) restart(name string) error {
	if _, err := b.doz("shutdown", "--yes", name); err != nil {
		return err
	}
	_, err := b.doz("exec", name, "--", "true")
	return err
}

// copies measures starts of new sandboxes, forks and restore points.
func (b *bench) copies(string) error {
	var starts, forks []float64
	for i := range rounds {
		name := fmt.Sprintf("start-%d", i)
		if _, err := b.doz("create", name); err != nil {
			return err
		}
		ms, err := median(1, func() error { _, err := b.doz("exec", name, "--", "true"); return err })
		if err != nil {
			return err
		}
		starts = append(starts, ms)
		fork := fmt.Sprintf("fork-%d", i)
		if ms, _, err = b.took("fork", "a1", fork); err != nil {
			return err
		}
		forks = append(forks, ms)
		for _, made := range []string{name, fork} {
			if _, err := b.doz("rm", "--yes", made); err != nil {
				return err
			}
		}
	}
	b.add(figure{Name: "new sandbox's start to exec's answer", Value: middle(starts), Unit: "ms", Aim: 350})
	b.add(figure{Name: "fork of a running sandbox", Value: middle(forks), Unit: "ms", Aim: 400})
	for _, phase := range []string{"running", "stopped"} {
		if phase == "stopped" {
			if _, err := b.doz("shutdown", "--yes", "a1"); err != nil {
				return err
			}
		}
		var points []float64
		for range rounds {
			ms, _, err := b.took("point", "take", "a1")
			if err != nil {
				return err
			}
			points = append(points, ms)
		}
		b.add(figure{Name: "restore point, " + phase, Value: middle(points), Unit: "ms", Aim: map[string]float64{"running": 60, "stopped": 5}[phase]})
	}
	return nil
}

// shapes measures what must not depend on the memory's size.
func (b *bench) shapes(string) error {
	results := map[string][]float64{}
	for _, memory := range []string{"512M", "8G"} {
		name := "shape-" + strings.ToLower(memory)
		if _, err := b.doz("create", name, "--memory", memory); err != nil {
			return err
		}
		if _, err := b.doz("exec", name, "--", "true"); err != nil {
			return err
		}
		for range rounds {
			for _, op := range []string{"hibernate", "wake"} {
				ms, _, err := b.took(op, name)
				if err != nil {
					return err
				}
				results[op+memory] = append(results[op+memory], ms)
			}
		}
		if _, err := b.doz("shutdown", "--yes", name); err != nil {
			return err
		}
	}
	for _, op := range []string{"hibernate", "wake"} {
		b.add(figure{Name: op + " at 8 GiB", Value: middle(results[op+"8G"]), Unit: "ms", Yardstick: op + " at 512 MiB", Against: middle(results[op+"512M"])})
	}
	return nil
}

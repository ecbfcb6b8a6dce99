//go:build linux

package qemu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"dozable.com/doz/internal/guest"
)

// BenchmarkColdBoot measures from Start to the guest's first bytes on its channel,
// and reports the median.
func BenchmarkColdBoot(b *testing.B) {
	const token = "00112233445566778899aabbccddeeff"
	for _, size := range []struct{ cpus, memory int }{{1, 512}, {1, 1024}, {2, 1024}, {1, 4096}} {
		b.Run(fmt.Sprintf("%dcpu-%dMiB", size.cpus, size.memory), func(b *testing.B) {
			dir := b.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "machine"), 0o700); err != nil {
				b.Fatal(err)
			}
			engine, c := testMachine(dir)
			c.CPUs, c.MemoryMiB, c.Cmdline = size.cpus, size.memory, []string{guest.TokenParam + "=" + token}
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(b.N)*patience)
			defer cancel()
			if _, err := engine.Probe(ctx); err != nil {
				b.Fatal(err)
			}
			var took []time.Duration
			for b.Loop() {
				began := time.Now()
				m, err := engine.Start(ctx, c)
				if err != nil {
					b.Fatal(err)
				}
				conn, err := m.DialGuest(ctx)
				if err == nil {
					_, err = guest.Open(ctx, conn, token)
				}
				took = append(took, time.Since(began))
				m.Kill()
				if err != nil {
					b.Fatal(err)
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Milliseconds()), "median-ms")
			b.ReportMetric(float64(took[0].Milliseconds()), "fastest-ms")
		})
	}
}

//go:build linux

package qemu

import "time"

// ticks reads this processor's time stamp counter.
func ticks() int64

// tscKHz measures the counter's rate against the monotonic clock. 40 ms tell it to
// a few parts in a million; the guest refines it.
func tscKHz() int64 {
	start, from := time.Now(), ticks()
	time.Sleep(40 * time.Millisecond)
	to, elapsed := ticks(), time.Since(start)
	return (to - from) * int64(time.Millisecond) / int64(elapsed)
}

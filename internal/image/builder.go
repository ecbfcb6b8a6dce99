package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/vm"
)

// BootFiles are the paths a builder machine boots from.
type BootFiles struct {
	Kernel, Initrd, Tools string
}

// The builder machine.
const (
	builderCPUs      = 2
	builderMemoryMiB = 1024
	builderConsole   = 256 << 10 // bytes kept of what it prints

	bootDeadline = 120 * time.Second
	offDeadline  = 60 * time.Second
	endGrace     = 2 * time.Second

	deckhold    = "/doz/bin/deckhold"
	rootDevice  = "/dev/vda"
	toolsDevice = "vdb"
	layerDevice = "/dev/vdc"
	rootMount   = "/mnt"
)

// buildDeadline is far more than the slowest computer needs for that many bytes.
func buildDeadline(plain int64) time.Duration {
	return 20*time.Minute + time.Duration(plain>>20)*time.Second
}

// Sizes of an image's disk. It is sparse, and grows within each sandbox.
const (
	giB      = 1 << 30
	minDisk  = 8 * giB
	perInode = 16 << 10 // bytes of disk, as deckhold makes the file system
)

// diskSize is room for what the layers hold, with an inode for each entry, in whole
// GiB.
func diskSize(layers *layerDisk) int64 {
	need := 2*layers.plain + layers.entries*perInode*5/4 + giB
	return max(minDisk, (need+giB-1)/giB*giB)
}

// builder makes one image's disk in one machine.
type builder struct {
	engine   vm.Engine
	boot     BootFiles
	dir      workshop
	progress progressFunc

	machine vm.Machine
	session *guest.Session
}

// built is what a builder says of its work.
type built struct {
	Entries int64 `json:"entries"`
	Bytes   int64 `json:"bytes"`
}

// build writes the layers to a new disk at path. The machine is gone when it
// returns; when it fails, what is in the workshop is worth nothing.
func (b *builder) build(ctx context.Context, layers *layerDisk, path string) (built, error) {
	if err := blankDisk(path, diskSize(layers)); err != nil {
		return built{}, fmt.Errorf("its disk cannot be made: %w", bare(err))
	}
	ctx, stop := context.WithTimeoutCause(ctx, buildDeadline(layers.plain), errors.New("the builder machine does not come to an end"))
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	b.progress.step("boot builder", 0, 0, "")
	if err := b.start(ctx, cancel, path, layers.path); err != nil {
		return built{}, because(ctx, err)
	}
	defer b.machine.Kill()
	defer b.session.Close()
	sum, err := b.fill(ctx, layers)
	if err == nil {
		err = b.powerOff(ctx)
	}
	if err != nil {
		return built{}, b.reason(ctx, err)
	}
	return sum, syncFile(path)
}

// reason is why a job failed. A channel that broke is followed by the machine's end,
// which says more.
func (b *builder) reason(ctx context.Context, err error) error {
	if errors.Is(err, errUnheard) {
		select {
		case <-ctx.Done():
		case <-time.After(endGrace):
		}
	}
	return because(ctx, err)
}

// start boots the machine and opens its channel. A machine that ends ends ctx.
func (b *builder) start(ctx context.Context, cancel context.CancelCauseFunc, disk, layers string) (err error) {
	if err := os.Mkdir(b.dir.machine(), 0o700); err != nil {
		return err
	}
	token := randomHex(16)
	b.machine, err = b.engine.Start(ctx, vm.Config{
		Dir: b.dir.machine(), Name: "image-builder", CPUs: builderCPUs, MemoryMiB: builderMemoryMiB,
		MemoryFile: b.dir.memory(), Kernel: b.boot.Kernel, Initrd: b.boot.Initrd,
		Cmdline: []string{guest.TokenParam + "=" + token, "doz.mode=builder", "doz.tools=" + toolsDevice},
		Disks: []vm.Disk{
			{Path: disk, Format: vm.Raw, Scratch: true},
			{Path: b.boot.Tools, Format: vm.Raw, ReadOnly: true},
			{Path: layers, Format: vm.Raw, ReadOnly: true},
		},
		ConsoleFile: b.dir.console(), ConsoleLimit: builderConsole,
	})
	if err != nil {
		return err
	}
	exit := b.machine.Wait()
	go func() {
		select {
		case e := <-exit:
			if !e.Clean {
				cancel(fmt.Errorf("the builder machine ended: %s", clip(e.Text)))
			}
			cancel(errors.New("the builder machine powered off too early"))
		case <-ctx.Done():
		}
	}()
	defer func() {
		if err != nil {
			b.machine.Kill()
		}
	}()
	booting, stop := context.WithTimeoutCause(ctx, bootDeadline, errors.New("the builder machine does not answer"))
	defer stop()
	conn, err := b.machine.DialGuest(booting)
	if err != nil {
		return because(booting, err)
	}
	if b.session, err = guest.Open(booting, conn, token); err != nil {
		return because(booting, err)
	}
	return nil
}

// fill makes the file system, unpacks every layer and seals it.
func (b *builder) fill(ctx context.Context, layers *layerDisk) (sum built, err error) {
	if _, err := b.run(ctx, nil, "mkroot", "--device", rootDevice, "--mount", rootMount); err != nil {
		return sum, err
	}
	for i, l := range layers.extents {
		one, err := b.layer(ctx, l, layers, sum)
		if err != nil {
			return sum, ofLayers(i, len(layers.extents), err)
		}
		sum.Entries += one.Entries
		sum.Bytes += one.Bytes
	}
	b.progress.step("seal image", 0, 0, "")
	_, err = b.run(ctx, nil, "seal", "--mount", rootMount)
	return sum, err
}

// ofLayers says which layer an error is of, where there are several.
func ofLayers(i, n int, err error) error {
	if n == 1 {
		return err
	}
	return fmt.Errorf("layer %d of %d: %w", i+1, n, err)
}

// layer unpacks one layer over those before it.
func (b *builder) layer(ctx context.Context, l extent, layers *layerDisk, before built) (one built, err error) {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	args := []string{"unpack", "--root", rootMount, "--from", layerDevice, "--offset", number(l.offset), "--size", number(l.size),
		"--max-entries", number(maxEntries - before.Entries), "--max-bytes", number(maxBytes - before.Bytes)}
	if l.whiteouts {
		args = append(args, "--whiteouts")
	}
	read := func(line []byte) {
		var r struct {
			Read int64 `json:"read"`
		}
		if json.Unmarshal(line, &r) == nil && r.Read > 0 && r.Read <= l.size {
			b.progress.step("unpack image", l.before+r.Read, layers.plain, "bytes")
		}
	}
	last, err := b.run(ctx, read, args...)
	if err != nil {
		return one, err
	}
	if json.Unmarshal(last, &one) != nil || one.Entries < 0 || one.Bytes < 0 ||
		one.Entries > maxEntries-before.Entries || one.Bytes > maxBytes-before.Bytes {
		return one, errGarbage
	}
	b.progress.step("unpack image", l.before+l.size, layers.plain, "bytes")
	return one, nil
}

// powerOff ends the machine, which must say goodbye: the disk is whole then.
func (b *builder) powerOff(ctx context.Context) error {
	exit := b.machine.Wait()
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), offDeadline, errors.New("the builder machine does not power off"))
	defer stop()
	// The machine may be gone before its answer is here, so only its end counts.
	b.session.Call(ctx, guest.OpPowerOff, struct{}{}, nil)
	select {
	case e := <-exit:
		if !e.Clean {
			return fmt.Errorf("the builder machine ended: %s", clip(e.Text))
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Limits of what a job in the builder may say.
const (
	maxSaid  = 16 << 10 // bytes of a line, and of what it complains
	maxLines = 1 << 20  // bytes of all lines
)

var (
	errGarbage = errors.New("the builder machine answers garbage")
	errUnheard = errors.New("the builder machine cannot be heard")
)

// run runs one of deckhold's jobs in the machine. told hears each line the job
// prints, the last of which run gives.
func (b *builder) run(ctx context.Context, told func(line []byte), args ...string) (last []byte, err error) {
	conn, _, err := b.session.Exec(ctx, guest.ExecRequest{Argv: append([]string{deckhold}, args...)})
	var refused *guest.Error
	if errors.As(err, &refused) {
		return nil, fmt.Errorf("the builder machine refuses: %s", oneLine(refused.Message))
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnheard, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()

	var out lines
	out.told = told
	var said []byte
	frames := guest.NewFrameReader(conn)
	for {
		typ, payload, err := frames.Read()
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errUnheard, err)
		}
		switch typ {
		case guest.Stdout:
			if err := out.add(payload); err != nil {
				return nil, err
			}
		case guest.Stderr:
			said = append(said, payload...)
			said = said[max(0, len(said)-maxSaid):]
		case guest.Failure:
			var e guest.Error
			json.Unmarshal(payload, &e)
			return nil, fmt.Errorf("the builder machine failed: %s", oneLine(e.Message))
		case guest.Exit:
			var status guest.ExitStatus
			if json.Unmarshal(payload, &status) != nil {
				return nil, errGarbage
			}
			if status.Code != 0 {
				return nil, failure(status, said)
			}
			return out.last, nil
		}
	}
}

// lines cuts output into lines.
type lines struct {
	told          func([]byte)
	partial, last []byte
	total         int
}

func (l *lines) add(data []byte) error {
	if l.total += len(data); l.total > maxLines {
		return errGarbage
	}
	l.partial = append(l.partial, data...)
	for {
		line, rest, whole := bytes.Cut(l.partial, []byte("\n"))
		if !whole {
			break
		}
		l.last = bytes.Clone(line)
		l.partial = rest
		if l.told != nil {
			l.told(l.last)
		}
	}
	if len(l.partial) > maxSaid {
		return errGarbage
	}
	return nil
}

// failure is a failed job in the words it wrote last.
func failure(status guest.ExitStatus, said []byte) error {
	if status.Signal != "" {
		return fmt.Errorf("the builder machine's job was ended by signal %s", oneLine(status.Signal))
	}
	lines := strings.Split(strings.TrimSpace(string(said)), "\n")
	if last := oneLine(lines[len(lines)-1]); last != "" {
		return errors.New(last)
	}
	return fmt.Errorf("the builder machine's job ended with code %d", status.Code)
}

// oneLine makes what a guest wrote fit for a sentence: nobody can steer a terminal
// with it.
func oneLine(s string) string {
	return clip(strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.TrimSpace(s)))
}

// because prefers the reason why a context ended over what that led to.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// blankDisk makes a sparse file.
func blankDisk(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Close())
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

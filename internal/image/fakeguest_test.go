package image

import (
	"archive/tar"
	"context"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/vm"
	"dozable.com/doz/internal/vm/vmfake"
)

// builderEngine starts fake machines whose guest does deckhold's jobs on the disks'
// files, as far as an image's host can tell.
type builderEngine struct {
	*vmfake.Engine

	// job, when set, answers a job instead; false leaves it to the usual answer.
	job func(m *builderMachine, args []string) (answer, bool)

	mu       sync.Mutex
	unpacked []string // names of all entries, in order
	layers   []string // the flags of each unpack that tell one layer from another
}

// answer is what a job prints and how it ends.
type answer struct {
	out, err string
	code     int
	never    bool // it does not answer
}

func newBuilderEngine() *builderEngine {
	return &builderEngine{Engine: vmfake.New(vmfake.Options{})}
}

func (e *builderEngine) Start(ctx context.Context, c vm.Config) (vm.Machine, error) {
	m, err := e.Engine.Start(ctx, c)
	if err != nil {
		return nil, err
	}
	return &builderMachine{Machine: m, engine: e, config: c}, nil
}

// builderMachine is a fake machine with a guest of its own.
type builderMachine struct {
	vm.Machine
	engine *builderEngine
	config vm.Config
}

func (m *builderMachine) DialGuest(context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	token := strings.TrimPrefix(m.config.Cmdline[0], guest.TokenParam+"=")
	go guest.NewPort(theirs, token).Serve(func(stream *guest.Stream) { m.answer(stream) })
	exit := m.Wait()
	go func() { <-exit; theirs.Close() }()
	return ours, nil
}

func (m *builderMachine) answer(stream net.Conn) {
	defer stream.Close()
	var request guest.Request
	if guest.ReadJSON(stream, &request) != nil {
		return
	}
	var exec guest.ExecRequest
	json.Unmarshal(request.Args, &exec)
	guest.WriteJSON(stream, guest.Response{OK: true, Result: json.RawMessage("{}")})
	if request.Op == guest.OpPowerOff {
		// The disk, and with it the image, is only whole after a clean end.
		m.PowerOff(context.Background())
		return
	}
	a, answered := answer{}, false
	if m.engine.job != nil {
		a, answered = m.engine.job(m, exec.Argv[1:])
	}
	if !answered {
		a = m.run(exec.Argv[1:])
	}
	if a.never {
		<-m.Wait()
		return
	}
	frames := guest.NewFrameWriter(stream)
	for out := a.out; out != ""; {
		n := min(len(out), guest.MaxFrame)
		if frames.Write(guest.Stdout, []byte(out[:n])) != nil {
			return
		}
		out = out[n:]
	}
	frames.Write(guest.Stderr, []byte(a.err))
	frames.WriteJSON(guest.Exit, guest.ExitStatus{Code: a.code})
}

// run does a job as deckhold does.
func (m *builderMachine) run(args []string) answer {
	switch args[0] {
	case "mkroot":
		return answer{}
	case "seal":
		if err := writeSuperblock(m.config.Disks[0].Path); err != nil {
			return answer{err: err.Error(), code: 1}
		}
		return answer{}
	case "unpack":
		return m.unpack(args[1:])
	}
	return answer{err: "no such job", code: 64}
}

func (m *builderMachine) unpack(args []string) answer {
	flags := flag.NewFlagSet("unpack", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.String("root", "", "")
	flags.String("from", "", "")
	offset, size := flags.Int64("offset", 0, ""), flags.Int64("size", 0, "")
	entries, bytes := flags.Int64("max-entries", 0, ""), flags.Int64("max-bytes", 0, "")
	whiteouts := flags.Bool("whiteouts", false, "")
	if err := flags.Parse(args); err != nil {
		return answer{err: err.Error(), code: 64}
	}
	disk, err := os.Open(m.config.Disks[2].Path)
	if err != nil {
		return answer{err: err.Error(), code: 1}
	}
	defer disk.Close()
	m.engine.mu.Lock()
	defer m.engine.mu.Unlock()
	m.engine.layers = append(m.engine.layers, fmt.Sprintf("whiteouts=%v limits=%v", *whiteouts, *entries > 0 && *bytes > 0))
	t := tar.NewReader(io.NewSectionReader(disk, *offset, *size))
	var sum built
	for {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return answer{err: fmt.Sprintf("the archive is damaged after %d entries: %v\n", sum.Entries, err), code: 65}
		}
		m.engine.unpacked = append(m.engine.unpacked, h.Name)
		sum.Entries++
		sum.Bytes += h.Size
	}
	return answer{out: fmt.Sprintf("{\"read\":%d}\n{\"entries\":%d,\"bytes\":%d}\n", *size, sum.Entries, sum.Bytes)}
}

// writeSuperblock makes a file look like a cleanly unmounted ext4.
func writeSuperblock(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	b := make([]byte, 2048)
	le := binary.LittleEndian
	blocks := uint64(info.Size()) / 4096
	le.PutUint32(b[superBlocksLo:], uint32(blocks))
	le.PutUint32(b[superBlocksHi:], uint32(blocks>>32))
	le.PutUint32(b[superLogBlock:], 2)
	le.PutUint16(b[superMagic:], ext4Magic)
	le.PutUint16(b[superState:], 1)
	_, err = f.WriteAt(b, 0)
	return err
}

// noMachines checks that no builder is left running.
func (e *builderEngine) noMachines(t *testing.T) {
	t.Helper()
	if n := e.Machines(); n != 0 {
		t.Errorf("%d machines are left running", n)
	}
}

package qemu

import (
	"context"
	"os"
	"testing"
	"time"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/initrd"
	"dozable.com/doz/internal/vm"
)

func TestSmoke(t *testing.T) {
	dh, _ := os.ReadFile("/tmp/deckhold")
	dir := t.TempDir()
	f, _ := os.Create(dir + "/initrd")
	if err := initrd.Write(f, map[string][]byte{"deckhold": dh}); err != nil { t.Fatal(err) }
	f.Close()
	e := New(Options{StateDir: dir})
	ctx, c := context.WithTimeout(context.Background(), 20*time.Second); defer c()
	feat, err := e.Probe(ctx); t.Log(feat, err, e.probed.TSCKHz)
	os.Chmod(dir, 0o755)
	os.Mkdir(dir+"/m", 0o700)
	tok := "0123456789abcdef0123456789abcdef"
	t0 := time.Now()
	m, err := e.Start(ctx, vm.Config{Dir: dir + "/m", Name: "x", CPUs: 2, MemoryMiB: 1024, MemoryFile: dir + "/mem", Kernel: "/tmp/k/done/x86_64-plain/vmlinux", Initrd: dir + "/initrd", Cmdline: []string{"doz.token=" + tok}, ConsoleFile: dir + "/con", ConsoleLimit: 1 << 20})
	if err != nil { t.Fatal(err) }
	defer func() { m.Kill(); b, _ := os.ReadFile(dir + "/con"); t.Log(string(b)) }()
	t.Log("started", time.Since(t0))
	conn, err := m.DialGuest(ctx)
	if err != nil { t.Fatal(err) }
	s, err := guest.Open(ctx, conn, tok)
	if err != nil { t.Fatal(err) }
	var r guest.SetupResponse
	if err := s.Call(ctx, guest.OpSetup, guest.SetupRequest{Hostname: "x", UnixNanos: time.Now().UnixNano()}, &r); err != nil { t.Fatal(err) }
	t.Log("ready", time.Since(t0), r)
	st, rr, err := s.Exec(ctx, guest.ExecRequest{Argv: []string{"/doz/bin/deckhold", "x"}})
	t.Log(rr, err)
	if err != nil { t.Fatal(err) }
	fr := guest.NewFrameReader(st)
	for { typ, p, err := fr.Read(); t.Log(typ, string(p), err); if err != nil || typ == guest.Exit { break } }
	var stt guest.Stats
	s.Call(ctx, guest.OpStats, struct{}{}, &stt); t.Log(stt)
	u, _ := m.Usage(); t.Log(u)
	t0 = time.Now()
	w := m.Wait()
	t.Log(s.Call(ctx, guest.OpPowerOff, struct{}{}, nil))
	t.Log(<-w, time.Since(t0))
}

// Testguest is PID 1 of the machines in the conformance suite: it sends back every
// byte that arrives on the guest channel, and powers off when the power button is
// pressed.
//
// It must not do more: what a real guest does is tested elsewhere.
package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"dozable.com/doz/internal/guest"
)

func main() {
	for _, m := range [][2]string{{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}} {
		if err := syscall.Mount(m[0], m[1], m[0], 0, ""); err != nil && err != syscall.EBUSY {
			fmt.Println("testguest: mount", m[1], err)
		}
	}
	if len(os.Args) > 1 {
		misbehave(os.Args[1:])
	}
	go powerButtons()
	port := openPort()
	fmt.Println("testguest: ready")
	for {
		// A read of 0 bytes means that nobody is connected on the other side.
		if _, err := io.Copy(port, onlyReader{port}); err != nil {
			fmt.Println("testguest:", err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// onlyReader keeps io.Copy from using sendfile, which a port does not have.
type onlyReader struct{ io.Reader }

// openPort waits for the guest channel's port to appear.
func openPort() *os.File {
	for {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			b, _ := os.ReadFile(n)
			if strings.TrimSpace(string(b)) != guest.PortName {
				continue
			}
			dev := "/dev/" + filepath.Base(filepath.Dir(n))
			// O_NONBLOCK is not set: the Go poller does not know of ports.
			fd, err := syscall.Open(dev, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
			if err == nil {
				return os.NewFile(uintptr(fd), dev)
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// powerButtons powers off when any input device reports the power key.
func powerButtons() {
	const evKey, keyPower = 1, 116
	devices, _ := filepath.Glob("/dev/input/event*")
	for _, d := range devices {
		f, err := os.Open(d)
		if err != nil {
			continue
		}
		go func() {
			var event struct {
				Time       syscall.Timeval
				Type, Code uint16
				Value      int32
			}
			for binary.Read(f, binary.NativeEndian, &event) == nil {
				if event.Type == evKey && event.Code == keyPower && event.Value == 1 {
					syscall.Sync()
					syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
				}
			}
		}()
	}
}

// misbehave does what the words after "--" on the kernel's command line ask for.
func misbehave(words []string) {
	for _, w := range words {
		switch w {
		case "test-flood": // more on the console than a host should keep
			line := strings.Repeat("x", 99) + "\n"
			for range 2000 {
				os.Stdout.WriteString(line)
			}
		case "test-scribble": // overwrites the first disk
			if f, err := os.OpenFile("/dev/vda", os.O_RDWR|os.O_SYNC, 0); err == nil {
				f.Write([]byte(strings.Repeat("scribble", 8192)))
				f.Close()
			}
		case "test-reset":
			syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
		}
	}
}

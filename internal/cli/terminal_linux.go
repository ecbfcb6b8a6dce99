package cli

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"os"

	"golang.org/x/sys/unix"
)

// dropInput drops what was typed and not read.
func dropInput(f *os.File) { unix.IoctlSetInt(int(f.Fd()), unix.TCFLSH, unix.TCIFLUSH) }

// settings are a terminal's, as one word.
func settings(f *os.File) string {
	t, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return ""
	}
	var b bytes.Buffer
	binary.Write(&b, binary.NativeEndian, t)
	return hex.EncodeToString(b.Bytes())
}

// set gives a terminal settings that it had.
func set(f *os.File, settings string) error {
	b, err := hex.DecodeString(settings)
	if err != nil {
		return err
	}
	var t unix.Termios
	if err := binary.Read(bytes.NewReader(b), binary.NativeEndian, &t); err != nil {
		return err
	}
	return unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, &t)
}

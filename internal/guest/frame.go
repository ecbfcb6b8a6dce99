package guest

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// frameHeader is type and length.
const frameHeader = 5

// FrameWriter writes frames, header and payload in one write. Not for concurrent use.
type FrameWriter struct {
	w   io.Writer
	buf []byte
}

// NewFrameWriter writes frames to w.
func NewFrameWriter(w io.Writer) *FrameWriter { return &FrameWriter{w: w} }

// Buffer is a payload of MaxFrame bytes to read into, so that WriteBuffered needs no
// copy.
func (f *FrameWriter) Buffer() []byte {
	f.grow(MaxFrame)
	return f.buf[frameHeader:]
}

// grow makes room for a payload of n bytes. Most streams only ever send small ones.
func (f *FrameWriter) grow(n int) {
	if len(f.buf) < frameHeader+n {
		f.buf = make([]byte, frameHeader+n)
	}
}

// WriteBuffered sends the first n bytes of Buffer as one frame.
func (f *FrameWriter) WriteBuffered(typ byte, n int) error {
	f.grow(n)
	putFrameHeader(f.buf, typ, n)
	_, err := f.w.Write(f.buf[:frameHeader+n])
	return err
}

// Write sends payload, at most MaxFrame bytes, as one frame.
func (f *FrameWriter) Write(typ byte, payload []byte) error {
	if len(payload) > MaxFrame {
		return fmt.Errorf("a frame of %d bytes is too long", len(payload))
	}
	f.grow(len(payload))
	return f.WriteBuffered(typ, copy(f.buf[frameHeader:], payload))
}

// FrameHeader is what stands before a frame's payload of n bytes.
func FrameHeader(typ byte, n int) []byte {
	head := make([]byte, frameHeader)
	putFrameHeader(head, typ, n)
	return head
}

func putFrameHeader(b []byte, typ byte, n int) {
	b[0] = typ
	binary.BigEndian.PutUint32(b[1:], uint32(n))
}

// WriteJSON sends v as one frame.
func (f *FrameWriter) WriteJSON(typ byte, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.Write(typ, data)
}

// FrameReader reads frames. Not for concurrent use.
type FrameReader struct {
	r    io.Reader
	head [frameHeader]byte
	buf  []byte
}

// NewFrameReader reads frames from r, which should not be read in small pieces at a
// price.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: r} }

// Read gives the next frame. The payload is valid until the next call. io.EOF is
// only given between frames.
func (f *FrameReader) Read() (typ byte, payload []byte, err error) {
	if _, err := io.ReadFull(f.r, f.head[:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the stream ended within a frame")
		}
		return 0, nil, err
	}
	n := int(binary.BigEndian.Uint32(f.head[1:]))
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("a frame of %d bytes is too long", n)
	}
	if n > len(f.buf) {
		f.buf = make([]byte, max(n, 4096))
	}
	if _, err := io.ReadFull(f.r, f.buf[:n]); err != nil {
		return 0, nil, errors.New("the stream ended within a frame")
	}
	return f.head[0], f.buf[:n], nil
}

// ReadLine reads one line of at most limit bytes, without its newline, and not a
// byte more: what follows a line may be frames.
func ReadLine(r io.Reader, limit int) ([]byte, error) {
	if s, ok := r.(*Stream); ok {
		return s.readLine(limit)
	}
	if br, ok := r.(io.ByteReader); ok {
		return readLine(br.ReadByte, limit)
	}
	one := make([]byte, 1)
	return readLine(func() (byte, error) {
		_, err := io.ReadFull(r, one)
		return one[0], err
	}, limit)
}

func readLine(next func() (byte, error), limit int) ([]byte, error) {
	var line []byte
	for {
		c, err := next()
		if err != nil {
			if err == io.EOF && len(line) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		if c == '\n' {
			return line, nil
		}
		if len(line) == limit {
			return nil, fmt.Errorf("a line is longer than %d bytes", limit)
		}
		line = append(line, c)
	}
}

// ReadJSON reads one line into v.
func ReadJSON(r io.Reader, v any) error {
	line, err := ReadLine(r, MaxLine)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(line, v); err != nil {
		return fmt.Errorf("a line is not the JSON it should be: %w", err)
	}
	return nil
}

// WriteJSON writes v as one line.
func WriteJSON(w io.Writer, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(data) > MaxLine {
		return fmt.Errorf("a line of %d bytes is too long", len(data))
	}
	_, err = w.Write(append(data, '\n'))
	return err
}

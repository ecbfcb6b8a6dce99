package host

import (
	"errors"
	"io"

	"dozable.com/doz/internal/guest"
)

// pass copies whole frames until there are no more, and gives the type of the last.
// An error is the receiver's: it takes no more.
func pass(to io.Writer, from io.Reader) (last byte, err error) {
	frames := guest.NewFrameReader(from)
	writer := guest.NewFrameWriter(to)
	for {
		typ, payload, err := frames.Read()
		if err != nil {
			return last, nil
		}
		if err := writer.Write(typ, payload); err != nil {
			return last, errors.New("the receiver is gone")
		}
		last = typ
	}
}

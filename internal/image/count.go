package image

import (
	"bytes"
	"fmt"
	"strconv"
)

var errTooMany = fmt.Errorf("it has more than %d entries", maxEntries)

// entryCounter counts the entries of the tar written to it, so that one of millions
// is refused before a machine labours on it, and a disk gets inodes enough. It
// believes in sizes and nothing else; what is no tar stops the count, and is left to
// the machine to complain about.
type entryCounter struct {
	entries, most int64

	block [tarBlock]byte
	have  int   // bytes of block
	skip  int64 // bytes to the next header
	done  bool
}

// What a tar header says where.
const (
	tarSizeAt, tarSizeLen = 124, 12
	tarTypeAt             = 156
)

// Write never keeps anything of b. Its only error is errTooMany.
func (c *entryCounter) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0 && !c.done; {
		if c.skip > 0 {
			n := min(c.skip, int64(len(rest)))
			c.skip -= n
			rest = rest[n:]
			continue
		}
		n := copy(c.block[c.have:], rest)
		c.have += n
		rest = rest[n:]
		if c.have == tarBlock {
			c.have = 0
			if err := c.header(); err != nil {
				return 0, err
			}
		}
	}
	return len(b), nil
}

func (c *entryCounter) header() error {
	if c.block == [tarBlock]byte{} {
		c.done = true // the end marker
		return nil
	}
	size, ok := tarSize(c.block[tarSizeAt : tarSizeAt+tarSizeLen])
	if !ok {
		c.done = true
		return nil
	}
	switch c.block[tarTypeAt] {
	case 'x', 'g', 'L', 'K': // they describe the entry that follows
	case '1', '2', '3', '4', '5', '6': // they have no content, whatever size they give
		size = 0
		fallthrough
	default:
		c.entries++
	}
	c.skip = (size + tarBlock - 1) / tarBlock * tarBlock
	if c.entries > c.most {
		return errTooMany
	}
	return nil
}

// tarSize reads a size: octal digits, or a big-endian number when the first bit is
// set.
func tarSize(field []byte) (int64, bool) {
	if field[0] == 0x80 {
		var n int64
		for _, c := range field[1:] {
			if n >= maxBytes {
				return 0, false
			}
			n = n<<8 | int64(c)
		}
		return n, n <= maxBytes
	}
	digits := string(bytes.Trim(field, " \x00"))
	if digits == "" {
		return 0, true
	}
	n, err := strconv.ParseInt(digits, 8, 64)
	return n, err == nil && n >= 0 && n <= maxBytes
}

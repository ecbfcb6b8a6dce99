package image

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// packing is how a file is compressed, told by its first bytes.
type packing int

const (
	packedNot packing = iota
	packedGzip
	packedZstd
	packedBzip2
	packedXZ
)

var packings = map[packing][]byte{
	packedGzip:  {0x1f, 0x8b},
	packedZstd:  {0x28, 0xb5, 0x2f, 0xfd},
	packedBzip2: []byte("BZh"),
	packedXZ:    {0xfd, '7', 'z', 'X', 'Z', 0},
}

func packingOf(r io.ReaderAt) (packing, error) {
	head := make([]byte, 6)
	n, err := r.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return packedNot, err
	}
	return packingOfHead(head[:n]), nil
}

func packingOfHead(head []byte) packing {
	for p, magic := range packings {
		if bytes.HasPrefix(head, magic) {
			return p
		}
	}
	return packedNot
}

// zstdWindow bounds what a zstd frame may make us keep in memory.
const zstdWindow = 128 << 20

// unpack gives r decompressed, whatever it is compressed with.
func unpack(r io.Reader) (io.ReadCloser, error) {
	br := bufio.NewReaderSize(r, 256<<10)
	head, err := br.Peek(6)
	if err != nil && err != io.EOF {
		return nil, err
	}
	switch packingOfHead(head) {
	case packedGzip:
		return gzip.NewReader(br)
	case packedZstd:
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return nil, err
		}
		return z.IOReadCloser(), nil
	case packedBzip2:
		return io.NopCloser(bzip2.NewReader(br)), nil
	case packedXZ:
		return nil, errors.New("it is compressed with xz, which doz does not read")
	}
	return io.NopCloser(br), nil
}

// Open gives the layer's uncompressed tar, at most limit bytes. The read that gives
// io.EOF has checked every digest: a layer that is not what it should be gives an
// error instead.
func (l Layer) Open(limit int64, m *meter) (io.ReadCloser, error) {
	stored, err := l.open()
	if err != nil {
		return nil, err
	}
	r := &layerReader{layer: l, closers: []io.Closer{stored}, plainSum: sha256.New()}
	r.raw = metered{stored, m}
	if l.Digest != "" && l.Digest != l.DiffID {
		r.rawSum = sha256.New()
		r.raw = io.TeeReader(r.raw, r.rawSum)
	}
	plain, err := unpack(r.raw)
	if err != nil {
		stored.Close()
		return nil, plainWords(err)
	}
	r.closers = append(r.closers, plain)
	r.plain = io.TeeReader(&bounded{r: plain, left: limit}, r.plainSum)
	return r, nil
}

// layerReader reads a layer and checks it at its end.
type layerReader struct {
	layer            Layer
	raw, plain       io.Reader
	rawSum, plainSum hash.Hash
	closers          []io.Closer
	err              error // what every further Read gives
}

func (r *layerReader) Read(b []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	n, err := r.plain.Read(b)
	if err == io.EOF {
		err = r.check()
	} else if err != nil {
		err = plainWords(err)
	}
	r.err = err
	return n, err
}

// check gives io.EOF when the layer is what it should be.
func (r *layerReader) check() error {
	if r.rawSum != nil {
		// What a decompressor left unread is part of the digest, and of what it bounds.
		if _, err := io.Copy(io.Discard, r.raw); err != nil {
			return plainWords(err)
		}
		if got := digestOf(r.rawSum); got != r.layer.Digest {
			return fmt.Errorf("its digest is %s and should be %s", got, r.layer.Digest)
		}
	}
	if got := digestOf(r.plainSum); got != r.layer.DiffID {
		return fmt.Errorf("its uncompressed digest is %s and should be %s", got, r.layer.DiffID)
	}
	return io.EOF
}

func (r *layerReader) Close() error {
	var err error
	for i := len(r.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, r.closers[i].Close())
	}
	return err
}

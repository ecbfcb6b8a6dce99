package network

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// maxLogBytes is how large a log's file grows before it becomes the earlier one. So a
// log takes at most twice as much.
const maxLogBytes = 8 << 20

// LogFile keeps a sandbox's log as JSON lines, in a file and the one before it. Its
// methods are for one goroutine.
type LogFile struct {
	path string
	file *os.File
	size int64
}

// OpenLog opens a log to append to.
func OpenLog(path string) (*LogFile, error) {
	l := &LogFile{path: path}
	return l, l.open()
}

func (l *LogFile) open() error {
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("cannot open the network log: %w", err)
	}
	info, err := file.Stat()
	if err != nil {
		file.Close()
		return fmt.Errorf("cannot open the network log: %w", err)
	}
	l.file, l.size = file, info.Size()
	return nil
}

// Write appends a record.
func (l *LogFile) Write(r Record) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if l.size > 0 && l.size+int64(len(line)) >= maxLogBytes {
		l.file.Close()
		if err := os.Rename(l.path, earlier(l.path)); err != nil {
			return fmt.Errorf("cannot rotate the network log: %w", err)
		}
		if err := l.open(); err != nil {
			return err
		}
	}
	n, err := l.file.Write(append(line, '\n'))
	l.size += int64(n)
	return err
}

// Close closes the file.
func (l *LogFile) Close() error { return l.file.Close() }

func earlier(path string) string { return path + ".1" }

// ReadLog visits the records of a log, the oldest first, until visit says false. Lines
// that cannot be read are passed over: the last may be half written.
func ReadLog(path string, visit func(Record) bool) error {
	for _, name := range []string{earlier(path), path} {
		file, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("cannot read the network log: %w", err)
		}
		lines := bufio.NewScanner(file)
		for lines.Scan() {
			var r Record
			if json.Unmarshal(lines.Bytes(), &r) == nil && !visit(r) {
				file.Close()
				return nil
			}
		}
		err = lines.Err()
		file.Close()
		if err != nil {
			return fmt.Errorf("cannot read the network log: %w", err)
		}
	}
	return nil
}

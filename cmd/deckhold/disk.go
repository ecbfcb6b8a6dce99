package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/layer"
)

// ext4ResizeFS is EXT4_IOC_RESIZE_FS: _IOW('f', 16, __u64).
const ext4ResizeFS = 0x40086610

// growExt4 grows the mounted file system when its device is larger.
func growExt4(device, mountpoint string) error {
	dev, err := os.Open(device)
	if err != nil {
		return err
	}
	defer dev.Close()
	size, err := dev.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	super := make([]byte, 1024)
	if _, err := dev.ReadAt(super, 1024); err != nil {
		return err
	}
	blockSize := int64(1024) << binary.LittleEndian.Uint32(super[24:])
	have := int64(binary.LittleEndian.Uint32(super[4:])) | int64(binary.LittleEndian.Uint32(super[0x150:]))<<32
	want := uint64(size / blockSize)
	if uint64(have) >= want {
		return nil
	}
	dir, err := os.Open(mountpoint)
	if err != nil {
		return err
	}
	defer dir.Close()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), ext4ResizeFS, uintptr(unsafe.Pointer(&want))); errno != 0 {
		return errno
	}
	return unix.Syncfs(int(dir.Fd()))
}

// mkroot makes an empty file system on a device and mounts it.
func mkroot(args []string) error {
	flags := flag.NewFlagSet("mkroot", flag.ContinueOnError)
	device := flags.String("device", "", "")
	mountpoint := flags.String("mount", "", "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	// One inode for 16 KiB, a 16 MiB journal, and room to grow to 2 TiB while
	// mounted. The tables are zero already: the disk is a new sparse file.
	mke2fs := exec.Command("/run/doz/tools/bin/mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=16",
		"-O", "64bit,metadata_csum,^resize_inode,meta_bg", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,assume_storage_prezeroed=1",
		"-m", "1", "-L", "root", *device)
	mke2fs.Env = withToolsData(os.Environ(), mke2fs.Path)
	if out, err := mke2fs.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot make a file system: %v: %s", err, strings.TrimSpace(string(out)))
	}
	if err := os.MkdirAll(*mountpoint, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(*device, *mountpoint, "ext4", unix.MS_NOATIME, "noinit_itable"); err != nil {
		return fmt.Errorf("cannot mount the new file system: %w", err)
	}
	return nil
}

// unpack applies the tar on standard input, or on a piece of a disk, to a root.
func unpack(args []string) error {
	flags := flag.NewFlagSet("unpack", flag.ContinueOnError)
	root := flags.String("root", "", "")
	var limits layer.Limits
	flags.BoolVar(&limits.Whiteouts, "whiteouts", false, "")
	flags.Int64Var(&limits.Entries, "max-entries", 2_000_000, "")
	flags.Int64Var(&limits.Bytes, "max-bytes", 64<<30, "")
	from := flags.String("from", "", "")
	offset := flags.Int64("offset", 0, "")
	size := flags.Int64("size", 0, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	// A disk is read many times faster than the guest channel.
	input := io.Reader(os.Stdin)
	if *from != "" {
		disk, err := os.Open(*from)
		if err != nil {
			return fmt.Errorf("cannot read the layers: %w", err)
		}
		defer disk.Close()
		input = &told{r: io.NewSectionReader(disk, *offset, *size)}
	}
	// Inside the root every link leads inside.
	if err := unix.Chroot(*root); err != nil {
		return fmt.Errorf("cannot enter %s: %w", *root, err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	unix.Umask(0)
	sum, err := layer.Apply(input, limits)
	if err != nil {
		return err
	}
	fmt.Printf("{\"entries\":%d,\"bytes\":%d}\n", sum.Entries, sum.Bytes)
	return nil
}

// told says every few MiB how much of r has been read.
type told struct {
	r       io.Reader
	n, said int64
}

func (t *told) Read(b []byte) (int, error) {
	n, err := t.r.Read(b)
	if t.n += int64(n); t.n-t.said >= 4<<20 {
		t.said = t.n
		fmt.Printf("{\"read\":%d}\n", t.n)
	}
	return n, err
}

// seal gives a root the folders every system has, trims it and unmounts it.
func seal(args []string) error {
	flags := flag.NewFlagSet("seal", flag.ContinueOnError)
	mountpoint := flags.String("mount", "", "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for dir, mode := range map[string]os.FileMode{"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o777 | os.ModeSticky} {
		// Lstat: an image may have a link there, which is not ours to follow.
		if _, err := os.Lstat(*mountpoint + "/" + dir); err == nil {
			continue
		}
		if err := os.Mkdir(*mountpoint+"/"+dir, 0o755); err != nil {
			return fmt.Errorf("cannot make /%s: %w", dir, err)
		}
		os.Chmod(*mountpoint+"/"+dir, mode)
	}
	trim(*mountpoint)
	unix.Sync()
	if err := unix.Unmount(*mountpoint, 0); err != nil {
		return fmt.Errorf("cannot unmount the image: %w", err)
	}
	return nil
}

// fitrim is FITRIM of linux/fs.h: _IOWR('X', 121, struct fstrim_range).
const fitrim = 0xc0185879

// trim gives back the room of what later layers removed. A disk that cannot is only
// larger than it need be.
func trim(mountpoint string) {
	dir, err := os.Open(mountpoint)
	if err != nil {
		return
	}
	defer dir.Close()
	all := struct{ start, length, least uint64 }{length: 1<<64 - 1}
	unix.Syscall(unix.SYS_IOCTL, dir.Fd(), fitrim, uintptr(unsafe.Pointer(&all)))
}

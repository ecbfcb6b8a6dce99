#!/bin/bash
# check.sh IMAGE: runs the layer's programs in a root that has nothing else, no shell
# and no C library, with a hostile LD_LIBRARY_PATH. Needs root, squashfs-tools, and
# this computer's own architecture.
set -euo pipefail
image=$(realpath "${1:?usage: check.sh IMAGE}")
[ "${INSIDE:-}" = 1 ] || INSIDE=1 exec unshare --mount --propagation private "$0" "$image"

root=$(mktemp -d)
trap 'umount -R "$root" && rmdir "$root"' EXIT
mount -t tmpfs tmpfs "$root"
mkdir -p "$root"/{dev,proc,tmp,run/doz/tools,decoy}
unsquashfs -quiet -no-progress -force -dest "$root/run/doz/tools" "$image" >/dev/null
mount --bind /dev "$root/dev"
mount --bind /dev/pts "$root/dev/pts"
mount --bind /proc "$root/proc"
# A file of the right name and no library: whoever loads it fails.
for name in libc.so.6 libtinfo.so.6 libext2fs.so.2 libasound.so.2; do echo decoy >"$root/decoy/$name"; done
truncate -s 8M "$root/tmp/disk"

at=/run/doz/tools chroot=$(command -v chroot)
run() {
	local program=$at/bin/$1
	shift
	env -i LD_LIBRARY_PATH=/decoy TERM=xterm-256color TERMINFO_DIRS=$at/share/terminfo TMUX_TMPDIR=/tmp LC_ALL=C.UTF-8 LOCPATH=$at/share/locale \
		ALSA_CONFIG_DIR=$at/share/alsa MKE2FS_CONFIG=$at/share/mke2fs.conf "$chroot" "$root" "$program" "$@"
}
run tmux -V
run tmux -f /dev/null new-session -d -s check "$at/bin/tmux" wait-for never
run tmux -f /dev/null list-sessions
run tmux -f /dev/null kill-server
run mke2fs -q -t ext4 /tmp/disk
run e2fsck -fp /tmp/disk
run tune2fs -l /tmp/disk | grep has_journal >/dev/null
truncate -s 16M "$root/tmp/disk"
run resize2fs /tmp/disk 2>&1 | sed -n 3p
run dumpe2fs -h /tmp/disk 2>/dev/null | grep '^Block count'
run aplay --version
run arecord --version
run aplay -L | sed -n 1p
run amixer --version
run alsactl --version
echo "tools: every program runs in an empty root"

#!/bin/bash
# build.sh ARCH OUT: the tools layer, one read-only disk image.
#   ARCH x86_64|arm64
# Programs of Debian packages with their own libraries and dynamic linker, so that
# they run in any image, one without a C library included. In the guest the image is
# mounted at /run/doz/tools. The same packages give the same bytes.
# Needs apt, patchelf and squashfs-tools.
set -euo pipefail
export LC_ALL=C TZ=UTC
case ${1:-} in
x86_64) deb=amd64 triplet=x86_64-linux-gnu linker=ld-linux-x86-64.so.2 ;;
arm64) deb=arm64 triplet=aarch64-linux-gnu linker=ld-linux-aarch64.so.1 ;;
*) echo "usage: build.sh x86_64|arm64 OUT" >&2; exit 64 ;;
esac
out=$(realpath -m "$2")
at=/run/doz/tools

programs=(/usr/bin/tmux /sbin/mke2fs /sbin/e2fsck /sbin/resize2fs /sbin/tune2fs /sbin/dumpe2fs
	/usr/bin/aplay /usr/bin/amixer /usr/sbin/alsactl)
packages=(tmux e2fsprogs alsa-utils libc6 libevent-core-2.1-7 libutempter0 libtinfo6 libsystemd0 libcap2 liblz4-1 liblzma5
	libzstd1 libgcrypt20 libgpg-error0 libext2fs2 libcom-err2 libblkid1 libuuid1 libss2 libasound2 libasound2-data libatopology2 ncurses-base)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{apt/lists/partial,apt/cache/archives/partial,debs,root,tree/{bin,lib,share/doc}}
touch "$work/apt/status"
cat >"$work/apt/sources.list" <<SOURCES
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian-security bookworm-security main
SOURCES
apt=(-qq -o Dir::State="$work/apt" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt/cache"
	-o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=- -o APT::Architecture=$deb
	-o APT::Architectures=$deb -o APT::Sandbox::User=root)
apt-get "${apt[@]}" update
(cd "$work/debs" && apt-get "${apt[@]}" download "${packages[@]}")

for file in "$work"/debs/*.deb; do
	dpkg-deb -x "$file" "$work/root"
	name=$(dpkg-deb -f "$file" Package)
	printf '%s %s\n' "$name" "$(dpkg-deb -f "$file" Version)" >>"$work/packages"
	cp "$work/root/usr/share/doc/$name/copyright" "$work/tree/share/doc/$name" 2>/dev/null || true
done
sort "$work/packages" >"$work/tree/PACKAGES"

# A program's libraries, found by name among the packages', and theirs in turn.
library() { find "$work/root/lib" "$work/root/usr/lib" -name "$1" -print -quit; }
gather() {
	local need file
	for need in $(patchelf --print-needed "$1"); do
		[ "$need" = "$linker" ] && continue
		[ -e "$work/tree/lib/$need" ] && continue
		file=$(library "$need")
		[ -n "$file" ] || { echo "build.sh: no package has $need, which $1 needs" >&2; exit 1; }
		install -m 644 "$(realpath "$file")" "$work/tree/lib/$need"
		gather "$work/tree/lib/$need"
		# libc has no libraries of its own, and is not to be touched.
		[ "$need" = libc.so.6 ] || patchelf --set-rpath "$at/lib" "$work/tree/lib/$need"
	done
}
for program in "${programs[@]}"; do
	file="$work/tree/bin/$(basename "$program")"
	install -m 755 "$work/root$program" "$file"
	gather "$file"
	patchelf --set-interpreter "$at/lib/$linker" --set-rpath "$at/lib" "$file"
done
install -m 755 "$(realpath "$(library "$linker")")" "$work/tree/lib/$linker"
ln -s aplay "$work/tree/bin/arecord"
ln -s mke2fs "$work/tree/bin/mkfs.ext4"
ln -s e2fsck "$work/tree/bin/fsck.ext4"

# Data: ALSA's configuration, and the terminals people use.
cp -a "$work/root/usr/share/alsa" "$work/tree/share/alsa"
rm -rf "$work/tree/share/alsa/ucm2" "$work/tree/share/alsa/ucm" "$work/tree/share/alsa/speaker-test"
for t in l/linux s/screen s/screen-256color t/tmux t/tmux-256color v/vt100 x/xterm x/xterm-256color d/dumb a/ansi; do
	[ -e "$work/root/lib/terminfo/$t" ] && install -D -m 644 "$work/root/lib/terminfo/$t" "$work/tree/share/terminfo/$t"
done

mkdir -p "$(dirname "$out")"
rm -f "$out"
mksquashfs "$work/tree" "$out" -quiet -no-progress -all-root -no-xattrs -comp zstd -Xcompression-level 19 \
	-mkfs-time 0 -all-time 0 -noappend -no-exports >/dev/null
echo "$out: $(stat -c %s "$out") bytes"

#!/bin/bash
# build.sh ARCH OUT: the tools layer, one read-only disk image.
#   ARCH x86_64|arm64
# Programs of Debian packages with their own libraries and dynamic linker, so that
# they run in any image, one without a C library included. In the guest the image is
# mounted at /run/doz/tools. The same packages give the same bytes.
# Needs apt, patchelf and squashfs-tools; installs nothing and leaves dpkg alone.
set -euo pipefail
export LC_ALL=C TZ=UTC
case ${1:-} in
x86_64) deb=amd64 linker=ld-linux-x86-64.so.2 ;;
arm64) deb=arm64 linker=ld-linux-aarch64.so.1 ;;
*) echo "usage: build.sh x86_64|arm64 OUT" >&2; exit 64 ;;
esac
out=$(realpath -m "${2:?usage: build.sh x86_64|arm64 OUT}")
at=/run/doz/tools

programs=(/usr/bin/tmux /sbin/mke2fs /sbin/e2fsck /sbin/resize2fs /sbin/tune2fs /sbin/dumpe2fs
	/usr/bin/aplay /usr/bin/amixer /usr/sbin/alsactl)
# The programs' packages, and those that have the libraries they name; gather says
# when one is missing.
packages=(tmux e2fsprogs alsa-utils libc6 libevent-core-2.1-7 libutempter0 libtinfo6 libc-bin
	libext2fs2 libcom-err2 libblkid1 libuuid1 libasound2 libasound2-data ncurses-base)

missing=()
command -v patchelf >/dev/null || missing+=(patchelf)
command -v mksquashfs >/dev/null || missing+=(squashfs-tools)
[ ${#missing[@]} = 0 ] || { echo "build.sh: needs packages that are not here: apt-get install ${missing[*]}" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{apt/lists/partial,apt/cache/archives/partial,debs,packages,tree/{bin,lib,share/doc}}
touch "$work/apt/status"
cat >"$work/apt/sources.list" <<SOURCES
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian-security bookworm-security main
SOURCES
apt=(-qq -o Dir::State="$work/apt" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt/cache"
	-o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=- -o APT::Architecture="$deb"
	-o APT::Architectures="$deb" -o APT::Sandbox::User=root)
echo "tools: downloading from Debian 12 for $deb: ${packages[*]}"
apt-get "${apt[@]}" update
(cd "$work/debs" && apt-get "${apt[@]}" download "${packages[@]}")
for file in "$work"/debs/*.deb; do
	name=$(dpkg-deb -f "$file" Package)
	dpkg-deb -x "$file" "$work/packages/$name"
	mv "$file" "$work/debs/$name.deb"
done

# take MODE FILE TO: puts a package's file into the layer, and notes the package.
declare -A used
take() {
	local package=${2#"$work/packages/"}
	used[${package%%/*}]=1
	install -D -m "$1" "$2" "$work/tree/$3"
}

# A program's libraries, found by name among the packages', and theirs in turn. They
# are found by DT_RPATH and not by RUNPATH, because a user's LD_LIBRARY_PATH would go
# before the latter, and another C library's files would be loaded.
library() { find "$work"/packages/*/lib "$work"/packages/*/usr/lib -name "$1" -print -quit 2>/dev/null; }
gather() {
	local need file
	for need in $(patchelf --print-needed "$1"); do
		if [ "$need" = "$linker" ] || [ -e "$work/tree/lib/$need" ]; then continue; fi
		file=$(library "$need")
		[ -n "$file" ] || { echo "build.sh: no package has $need, which $1 needs" >&2; exit 1; }
		take 644 "$(realpath "$file")" "lib/$need"
		gather "$work/tree/lib/$need"
		# libc has no libraries of its own, and is not to be touched.
		[ "$need" = libc.so.6 ] || patchelf --force-rpath --set-rpath "$at/lib" "$work/tree/lib/$need"
	done
}
for program in "${programs[@]}"; do
	file=$(find "$work"/packages/*"$program" -print -quit)
	to=bin/$(basename "$program")
	take 755 "$file" "$to"
	gather "$work/tree/$to"
	patchelf --set-interpreter "$at/lib/$linker" --force-rpath --set-rpath "$at/lib" "$work/tree/$to"
done
take 755 "$(realpath "$(library "$linker")")" "lib/$linker"
ln -s aplay "$work/tree/bin/arecord"
ln -s mke2fs "$work/tree/bin/mkfs.ext4"
ln -s e2fsck "$work/tree/bin/fsck.ext4"

# Data: ALSA's configuration, mke2fs's, the one locale tmux insists on, and the
# terminals people use.
cp -a "$work/packages/libasound2-data/usr/share/alsa" "$work/tree/share/alsa"
used[libasound2-data]=1
rm -rf "$work/tree/share/alsa/ucm2" "$work/tree/share/alsa/ucm" "$work/tree/share/alsa/speaker-test"
cp -a "$work/packages/alsa-utils/usr/share/alsa/init" "$work/tree/share/alsa/init"
take 644 "$work/packages/e2fsprogs/etc/mke2fs.conf" share/mke2fs.conf
cp -a "$work/packages/libc-bin/usr/lib/locale" "$work/tree/share/locale"
used[libc-bin]=1
for t in a/ansi d/dumb l/linux s/screen s/screen-256color t/tmux t/tmux-256color v/vt100 v/vt220 x/xterm x/xterm-256color; do
	take 644 "$work/packages/ncurses-base/lib/terminfo/$t" "share/terminfo/$t"
done

# What went in: name, version, source, licences, and the terms in full.
for name in $(printf '%s\n' "${!used[@]}" | sort); do
	terms=$work/packages/$name/usr/share/doc/$name/copyright
	[ -f "$terms" ] || { echo "build.sh: package $name has no copyright file of its own" >&2; exit 1; }
	install -m 644 "$terms" "$work/tree/share/doc/$name"
	licences=$(sed -n 's/^License: *\([^ ].*\)$/\1/p' "$terms" | sort -u | paste -s -d ';' | sed 's/;/, /g')
	dpkg-deb --show --showformat '${Package}\t${Version}\t${source:Package} ${source:Version}' "$work/debs/$name.deb"
	printf '\t%s\n' "${licences:-see share/doc/$name}"
done >"$work/tree/PACKAGES"

# No owners, no times. lz4 and not zstd: under emulation a program's first start takes
# less than half as long, for 1 MB (docs/decisions/tools-layer.md).
find "$work/tree" -type d -exec chmod 755 {} +
mkdir -p "$(dirname "$out")"
rm -f "$out.new"
mksquashfs "$work/tree" "$out.new" -quiet -no-progress -all-root -no-xattrs -comp lz4 -Xhc \
	-mkfs-time 0 -all-time 0 -noappend -no-exports >/dev/null
chmod 644 "$out.new"
mv "$out.new" "$out"
[ -z "${TREE:-}" ] || cp -a "$work/tree" "$TREE"
echo "tools: $out, $(stat -c %s "$out") bytes"

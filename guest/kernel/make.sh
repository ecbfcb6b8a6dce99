#!/bin/bash
# make.sh: builds the four guest kernels again from Debian's source package, packs
# them, and says whether they are the recorded ones, byte by byte.
# Takes 11 minutes of two processors. With KEEP=1 it replaces the committed kernels,
# configurations and sums by what it built; without, it only compares.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here"
cache=$(realpath -m ../../.cache/kernel)

package=linux-source-6.12
version=6.12.117-1~deb12u1
release=6.12.117
tarball_sha256=585a4a074597aefa2b1a68ada83a3184ba351c127544dea80618bbcceaa3961f
needed=(gcc gcc-aarch64-linux-gnu binutils make flex bison bc libelf-dev libssl-dev xz-utils zstd)

missing=()
for p in "${needed[@]}"; do
	dpkg-query -W -f '${Status}\n' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} != 0 ]; then
	echo "make.sh: needs packages that are not here: apt-get install ${missing[*]}" >&2
	exit 1
fi
for tool in gcc aarch64-linux-gnu-gcc ld; do "$tool" --version | head -n 1; done

mkdir -p "$cache"
tarball=$cache/$release.tar.xz
if ! echo "$tarball_sha256  $tarball" | sha256sum --check --status 2>/dev/null; then
	echo "kernel: downloading $package $version (about 150 MB) from Debian"
	(cd "$cache" && apt-get -qq download "$package=$version") || {
		echo "make.sh: this Debian's archive no longer has $package $version: get it from snapshot.debian.org" >&2
		exit 1
	}
	dpkg-deb --fsys-tarfile "$cache/${package}_${version}_all.deb" | tar -xO "./usr/src/$package.tar.xz" >"$tarball"
	rm "$cache/${package}_${version}_all.deb"
	echo "$tarball_sha256  $tarball" | sha256sum --check --quiet
fi
source=$cache/$package
[ -e "$source/.unpacked" ] || { rm -rf "$source"; tar -xf "$tarball" -C "$cache"; touch "$source/.unpacked"; }

built=$cache/built
rm -rf "$built"
mkdir -p "$built"
for arch in x86_64 arm64; do
	for variant in plain sound; do
		echo "kernel: building $arch $variant"
		./build.sh "$source" "$cache/out-$arch" "$arch" "$variant" >"$built/$arch-$variant.log" 2>&1 ||
			{ tail -n 20 "$built/$arch-$variant.log" >&2; exit 1; }
		cp "$cache/out-$arch/.config" "$built/config-$arch-$variant"
		case $arch in
		x86_64) strip -o "$built/vmlinux-$arch-$variant" "$cache/out-$arch/vmlinux" ;;
		arm64) cp "$cache/out-$arch/arch/arm64/boot/Image" "$built/image-$arch-$variant" ;;
		esac
	done
done

cd "$built"
if sha256sum --check "$here/SHA256SUMS"; then
	echo "kernel: all four are the recorded ones, byte by byte"
	exit 0
fi
[ "${KEEP:-}" = 1 ] || { echo "kernel: not the recorded ones; they are in $built" >&2; exit 1; }
for kernel in vmlinux-* image-*; do
	zstd -q -19 -f "$kernel" -o "$here/$kernel.zst"
	chmod 644 "$here/$kernel.zst"
done
cp config-* "$here/"
sha256sum vmlinux-* image-* >"$here/SHA256SUMS"
echo "kernel: the new kernels, configurations and sums are in guest/kernel"

#!/bin/bash
# build.sh SRC OUT ARCH VARIANT: one guest kernel, to the same bytes every time.
#   ARCH x86_64|arm64   VARIANT plain|sound
# OUT may hold an earlier build of the same ARCH, which is then continued
# (the sound variant after the plain one takes seconds).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
src=$1 out=$2 arch=$3 variant=$4
export LC_ALL=C TZ=UTC
export KBUILD_BUILD_TIMESTAMP='2026-01-01 00:00:00 UTC' KBUILD_BUILD_USER=doz KBUILD_BUILD_HOST=doz KBUILD_BUILD_VERSION=1

fragments=("$here/fragments/common.config" "$here/fragments/$arch.config")
case $variant in
plain) ;;
sound) fragments+=("$here/fragments/sound.config") ;;
*) echo "build.sh: unknown variant $variant" >&2; exit 64 ;;
esac
case $arch in
x86_64) args=(ARCH=x86_64) target=vmlinux ;;
arm64) args=(ARCH=arm64 CROSS_COMPILE=aarch64-linux-gnu-) target=Image ;;
*) echo "build.sh: unknown architecture $arch" >&2; exit 64 ;;
esac

mkdir -p "$out"
asked=$out/doz.config
cat "${fragments[@]}" >"$asked"
make -C "$src" O="$out" "${args[@]}" KCONFIG_ALLCONFIG="$asked" allnoconfig >/dev/null

# Kconfig drops what it cannot grant without a word: every option asked for must be there.
refused=$(grep -E '^CONFIG_' "$asked" | grep -vxFf "$out/.config" || true)
while IFS= read -r line; do
	name=${line#\# } name=${name% is not set}
	grep -q "^$name=" "$out/.config" && refused+=$'\n'"$name is set"
done < <(grep -E '^# CONFIG_.* is not set$' "$asked")
[ -z "$refused" ] || { printf 'build.sh: not granted:\n%s\n' "$refused" >&2; exit 1; }

make -C "$src" O="$out" "${args[@]}" -j"${JOBS:-$(nproc)}" "$target"

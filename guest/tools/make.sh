#!/bin/bash
# make.sh: builds the tools layers of both architectures from what Debian 12 has now,
# runs this computer's own in an empty root (as root only), and says what changed.
set -euo pipefail
cd "$(dirname "$0")"
for arch in x86_64 arm64; do ./build.sh "$arch" "tools-$arch.squashfs"; done
case $(uname -m) in aarch64) own=arm64 ;; *) own=x86_64 ;; esac
[ "$(id -u)" != 0 ] || ./check.sh "tools-$own.squashfs"

{
	cat <<'HEAD'
# What is in the tools layers

Written by `make tools`. Programs and libraries of Debian 12, unchanged but for the paths of their
dynamic linker and libraries (set with patchelf). The terms of each package in full are in the layer,
under `/run/doz/tools/share/doc`.

For three years after the day you got a doz that carries these layers, the doz project gives the
complete corresponding source of the packages under GPL and LGPL to anyone who asks through its
issue tracker, for no more than the cost of sending it. Debian has the same source, under the
versions below.
HEAD
	for arch in x86_64 arm64; do
		printf '\n## %s\n\n| package | version | source | licences |\n| --- | --- | --- | --- |\n' "$arch"
		unsquashfs -cat "tools-$arch.squashfs" PACKAGES | awk -F '\t' '{printf "| %s | %s | %s | %s |\n", $1, $2, $3, $4}'
	done
} >PACKAGES.md
if sha256sum --check --quiet SHA256SUMS 2>/dev/null; then
	echo "tools: both layers are the recorded ones, byte by byte"
else
	sha256sum tools-x86_64.squashfs tools-arm64.squashfs >SHA256SUMS
	echo "tools: the layers changed; commit them with SHA256SUMS and PACKAGES.md"
fi

#!/bin/bash
# build.sh OUT.tar: the root of the image "lab", from Debian's packages.
set -euo pipefail
export LC_ALL=C TZ=UTC
out=${1:?usage: build.sh OUT.tar}
packages=bash,coreutils,apt,python3-minimal,python3,git,curl,ca-certificates,less,vim-tiny,iproute2,procps,netbase,tzdata
case $(uname -m) in aarch64) arch=arm64 ;; *) arch=amd64 ;; esac

echo "lab: fetching Debian 12 packages ($packages)" >&2
mmdebstrap --quiet --variant=minbase --format=tar --architectures="$arch" --include="$packages" \
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
	--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/info/*' \
	--dpkgopt='path-exclude=/usr/share/locale/*' --aptopt='Acquire::Languages "none"' \
	--customize-hook='rm -f "$1/etc/hostname" "$1/etc/resolv.conf"; : >"$1/etc/machine-id"' \
	--customize-hook='printf "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n" >"$1/etc/hosts"' \
	bookworm "$out.new" >&2
mv "$out.new" "$out"

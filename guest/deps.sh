#!/bin/bash
# deps.sh: installs what doz and its tests need and this Debian lacks, and says what
# it installs before it does.
set -euo pipefail
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
installed() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }
newest() { apt-cache policy "$1" | awk '/Candidate:/ {print $2}'; }

command -v apt-get >/dev/null || { echo "deps: this is no Debian; install QEMU 8.2 or later and mmdebstrap" >&2; exit 1; }
qemu="qemu-system-x86"
[ "$(uname -m)" = aarch64 ] && qemu="qemu-system-arm"

# mmdebstrap and the keyring make the lab image. The rest is the tests': gcc for the
# race detector, e2fsprogs to look into disks that machines wrote, python3 for the
# protocol's example client, tmux for terminals to look at sessions in.
wanted=()
for package in mmdebstrap debian-archive-keyring gcc libc6-dev e2fsprogs python3-minimal tmux; do
	installed "$package" || wanted+=("$package")
done
# Without root, mmdebstrap works in a user namespace.
[ "$(id -u)" = 0 ] || installed uidmap || wanted+=(uidmap)
have=$(dpkg-query -W -f '${Version}' "$qemu" 2>/dev/null || true)
if [ -z "$have" ] || dpkg --compare-versions "${have#*:}" lt 8.2; then upgrade=1; else upgrade=; fi
[ ${#wanted[@]} = 0 ] && [ -z "$upgrade" ] && exit 0

echo "deps: this will install from Debian: ${wanted[*]}${upgrade:+ $qemu (8.2 or later)}"
as_root apt-get -qq update
if [ -n "$upgrade" ]; then
	target=()
	candidate=$(newest "$qemu")
	if dpkg --compare-versions "${candidate#*:}" lt 8.2; then
		. /etc/os-release
		if ! apt-cache policy | grep -q "n=$VERSION_CODENAME-backports\|a=.*-backports"; then
			echo "deps: this will add /etc/apt/sources.list.d/doz-backports.sources ($VERSION_CODENAME-backports, for QEMU)"
			printf 'Types: deb\nURIs: http://deb.debian.org/debian\nSuites: %s-backports\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' "$VERSION_CODENAME" |
				as_root tee /etc/apt/sources.list.d/doz-backports.sources >/dev/null
			as_root apt-get -qq update
		fi
		target=(-t "$VERSION_CODENAME-backports")
	fi
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${target[@]}" "$qemu" >/dev/null
fi
[ ${#wanted[@]} = 0 ] || as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${wanted[@]}" >/dev/null

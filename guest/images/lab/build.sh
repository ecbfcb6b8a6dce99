#!/bin/bash
# build.sh OUT.tar: the root of the image "lab", from Debian 12's packages, with its
# security and point updates. OUT.tar.packages lists what went in, with versions.
# Needs mmdebstrap and Debian's archive keyring.
set -euo pipefail
export LC_ALL=C TZ=UTC
out=$(realpath -m "${1:?usage: build.sh OUT.tar}")
packages=bash,coreutils,apt,python3,git,openssh-client,curl,ca-certificates,less,vim-tiny,iproute2,procps,netbase,tzdata,mount,passwd
folders='bin sbin lib'
case $(uname -m) in
aarch64) arch=arm64 ;;
*) arch=amd64 folders+=' lib64' ;;
esac

# Made in memory where there is room: dpkg's syncs then cost nothing.
room=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1 || true)
[ "${room:-0}" -lt 1500000 ] || export TMPDIR=/dev/shm

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A root with /bin and the like merged into /usr from the start, as Debian has it.
# usr-is-merged says so to apt, and keeps out usrmerge, which would convert a root.
cat >"$work/begin" <<BEGIN
#!/bin/sh
set -e
for folder in $folders; do mkdir -p "\$1/usr/\$folder"; ln -s "usr/\$folder" "\$1/\$folder"; done
BEGIN

# Documentation and translations are left out, now and when a user installs more. They
# are removed afterwards, not by dpkg's path-exclude: under that, mmdebstrap filters
# every package through a program of its own, which doubles the time.
cat >"$work/finish" <<'FINISH'
#!/bin/sh
set -e
root=$1 list=$2
find "$root/usr/share/doc" ! -type d ! -name copyright -delete
find "$root/usr/share/doc" -mindepth 1 -type d -empty -delete
rm -rf "$root"/usr/share/man/* "$root"/usr/share/info/* "$root"/usr/share/locale/*
cat >"$root/etc/dpkg/dpkg.cfg.d/lab" <<'CONFIG'
path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
CONFIG
# For the build only: a sandbox's disk keeps what dpkg says it kept.
rm -f "$root/etc/dpkg/dpkg.cfg.d/99mmdebstrap"
# What every machine gets for itself.
rm -f "$root/etc/hostname" "$root/etc/resolv.conf"
: >"$root/etc/machine-id"
printf '127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
chroot "$root" dpkg-query -W >"$list"
FINISH
chmod 755 "$work" "$work/begin" "$work/finish"

echo "lab: downloading about 75 MB of Debian 12 packages (${packages//,/ } and what they need)" >&2
# One pass over all packages ("custom"), where the other variants take two or three.
mmdebstrap --quiet --variant=custom --format=tar --architectures="$arch" --include="?essential" --include="usr-is-merged,$packages" \
	--dpkgopt=force-unsafe-io --aptopt='Acquire::Languages "none"' \
	--setup-hook="$work/begin \"\$1\"" --customize-hook="$work/finish \"\$1\" $work/packages" \
	bookworm "$work/root.tar" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
mkdir -p "$(dirname "$out")"
mv "$work/packages" "$out.packages"
mv "$work/root.tar" "$out.new"
mv "$out.new" "$out"

#!/bin/sh
# Tries the project as on a new machine: a bare Debian in a folder, in it a clone of the last
# commit, and there the given make targets. Run as root, before a release.
#
#   tools/fresh_root.sh RELEASE FOLDER [TARGET...]
#
#   tools/fresh_root.sh trixie /var/tmp/trixie demo test
#
# RELEASE is Debian's name of it (bookworm, trixie). The root has Debian's minimal system,
# make, and what this machine's apt and pip are told about mirrors and certificates; the rest
# must come from the project's own files. An existing root is used again.
set -eu

[ $# -ge 2 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
release=$1 root=$2
shift 2
source=$(cd "$(dirname "$0")/.." && pwd)
command -v debootstrap >/dev/null || {
  echo "debootstrap is missing: apt-get install -y debootstrap" >&2
  exit 1
}

if [ ! -e "$root/etc/debian_version" ]; then
  # The mirror that this machine's own apt uses.
  mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep '/debian/*$' | head -n 1)
  debootstrap --variant=minbase --include=make,ca-certificates "$release" "$root" "$mirror"
fi
for settings in /etc/apt/apt.conf.d/99* /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
  [ -e "$settings" ] && cp "$settings" "$root$settings"
done

unmount() { umount -R "$root/proc" "$root/dev" 2>/dev/null || true; }
trap unmount EXIT INT TERM
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
cp /etc/resolv.conf "$root/etc/resolv.conf"

rm -rf "$root/src"
git clone -q "$source" "$root/src"
for target in "$@"; do
  echo "--- make $target on $release"
  chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ${PIP_CERT:+PIP_CERT="$PIP_CERT"} make -C /src "$target"
done

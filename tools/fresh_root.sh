#!/bin/sh
# Tries the project as on a new machine: a bare Debian in a folder, in it a clone of the last
# commit, and there the given make targets. Run as root, before a release.
#
#   tools/fresh_root.sh RELEASE FOLDER [TARGET...]
#
#   tools/fresh_root.sh trixie /var/tmp/trixie demo test
#
# RELEASE is Debian's name of it (bookworm, trixie). The root has Debian's minimal system,
# make, and what this machine's apt and pip are told about mirrors, proxies and certificates;
# the rest must come from the project's own files. An existing root is used again.
set -eu

fail() {
  echo "fresh_root.sh: $1" >&2
  exit 1
}

[ $# -ge 2 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ "$(id -u)" = 0 ] || fail "must run as root: it mounts, and changes its root folder"
command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"
# Mounts of a namespace of its own end with its last process, however that ends.
[ -n "${FRESH_ROOT:-}" ] || FRESH_ROOT=1 exec unshare --mount "$0" "$@"

release=$1 root=$2
shift 2
source=$(cd "$(dirname "$0")/.." && pwd)

if [ ! -e "$root" ]; then
  mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep '/debian/*$' | head -n 1)
  [ -n "$mirror" ] || fail "this machine's apt names no mirror of Debian"
  rm -rf "$root.part"
  debootstrap --variant=minbase --include=make,ca-certificates "$release" "$root.part" \
    "$mirror" || fail "debootstrap failed: $root.part/debootstrap/debootstrap.log may say why"
  mv "$root.part" "$root"
fi
# Debian's name of a root is in its apt's settings.
grep -qsw "$release" "$root/etc/apt/sources.list" || fail "$root is no root of $release"

for settings in /etc/apt/apt.conf.d/99* /etc/pip.conf /etc/ssl/certs/ca-certificates.crt \
  /etc/resolv.conf; do
  [ ! -e "$settings" ] || cp "$settings" "$root$settings"
done
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
rm -rf "$root/src"
git clone -q "$source" "$root/src"

for target in "$@"; do
  echo "--- make $target on $release"
  chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ${PIP_CERT:+PIP_CERT="$PIP_CERT"} ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
    ${PIP_DEFAULT_TIMEOUT:+PIP_DEFAULT_TIMEOUT="$PIP_DEFAULT_TIMEOUT"} \
    ${https_proxy:+https_proxy="$https_proxy"} make -C /src "$target"
done

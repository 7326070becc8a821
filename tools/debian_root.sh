# Functions for a bare Debian in a folder; sourced by scripts that run as root.

fail() {
  echo "${0##*/}: $1" >&2
  exit 1
}

# Starts the script again with mounts of its own, which end with its last process, however
# that ends. To be called first, with the script's arguments.
own_mounts() {
  [ "$(id -u)" = 0 ] || fail "must run as root: it mounts, and changes its root folder"
  command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"
  [ -n "${OWN_MOUNTS:-}" ] || OWN_MOUNTS=1 exec unshare --mount "$0" "$@"
}

# open_root RELEASE FOLDER PACKAGES: makes the root if it is not there, with Debian's minimal
# system, the packages (separated by commas), and what this machine's apt and pip are told
# about mirrors, proxies and certificates; an existing one is used again.
open_root() {
  if [ ! -e "$2" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep '/debian/*$' | head -n 1)
    [ -n "$mirror" ] || fail "this machine's apt names no mirror of Debian"
    rm -rf "$2.part"
    debootstrap --variant=minbase --include="$3,ca-certificates" "$1" "$2.part" \
      "$mirror" || fail "debootstrap failed: $2.part/debootstrap/debootstrap.log may say why"
    mv "$2.part" "$2"
  fi
  # Debian's name of a root is in its apt's settings.
  grep -qsw "$1" "$2/etc/apt/sources.list" || fail "$2 is no root of $1"
  for settings in /etc/apt/apt.conf.d/99* /etc/pip.conf /etc/ssl/certs/ca-certificates.crt \
    /etc/resolv.conf; do
    [ ! -e "$settings" ] || cp "$settings" "$2$settings"
  done
  # As Debian's installer leaves it: a host knows its own name.
  printf '127.0.0.1\tlocalhost\n127.0.1.1\t%s\n' "$(hostname)" >"$2/etc/hosts"
  mount -t proc proc "$2/proc"
  mount --rbind /sys "$2/sys"
  mount --rbind /dev "$2/dev"
}

# in_root FOLDER COMMAND...: runs it there, with an environment of its own.
in_root() {
  folder=$1
  shift
  chroot "$folder" /usr/bin/env -i HOME=/root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ${PIP_CERT:+PIP_CERT="$PIP_CERT"} ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
    ${PIP_DEFAULT_TIMEOUT:+PIP_DEFAULT_TIMEOUT="$PIP_DEFAULT_TIMEOUT"} \
    ${https_proxy:+https_proxy="$https_proxy"} "$@"
}

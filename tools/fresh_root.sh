#!/bin/sh
# Tries the project as on a new machine: a bare Debian in a folder, in it a clone of the last
# commit, and there the given make targets. Run as root, before a release.
#
#   tools/fresh_root.sh RELEASE FOLDER [TARGET...]
#
#   tools/fresh_root.sh trixie /var/tmp/trixie demo test
#
# RELEASE is Debian's name of it (bookworm, trixie). The root has Debian's minimal system and
# make; the rest must come from the project's own files. An existing root is used again.
set -eu
. "$(dirname "$0")/debian_root.sh"

[ $# -ge 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
own_mounts "$@"
release=$1 root=$2
shift 2
source=$(cd "$(dirname "$0")/.." && pwd)

open_root "$release" "$root" make
rm -rf "$root/src"
git clone -q "$source" "$root/src"
for target in "$@"; do
  echo "--- make $target on $release"
  in_root "$root" make -C /src "$target"
done

#!/bin/sh
# Tries each way to install, on a bare Debian with python3, gcc and make. Run as root, before a
# release.
#
#   tools/check_ways.sh RELEASE FOLDER
#
#   tools/check_ways.sh bookworm /var/tmp/bookworm-ways
#
# Where headers are missing, each way must say the one line that brings them; with them, each
# must end with a library that works. An existing root is made anew.
set -eu
. "$(dirname "$0")/debian_root.sh"

[ $# = 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
own_mounts "$@"
release=$1 root=$2
source=$(cd "$(dirname "$0")/.." && pwd)

rm -rf "$root"
open_root "$release" "$root" python3,python3-venv,gcc,libc6-dev,make
git clone -q "$source" "$root/src"
sed -n '/^```python$/,/^```$/p' "$source/README.md" | sed '/^```/d' > "$root/step.py"

# says TEXT COMMAND...: the command fails, and says so.
says() {
  text=$1
  shift
  if in_root "$root" "$@" > "$root/said" 2>&1; then fail "'$*' did not fail"; fi
  grep -qF "$text" "$root/said" || { cat "$root/said" >&2; fail "'$*' did not say: $text"; }
  echo "says it: $text"
}

trains() { # trains VENV: the README's step, and the command
  in_root "$root" sh -c "cd / && $1/bin/python step.py && $1/bin/jaxpp --version" | tail -2
}

in_root "$root" useradd --create-home user
in_root "$root" chown -R user /src
in_root "$root" python3 -m venv /v
says "sudo apt-get install -y" su user -c "make -C /src install PREFIX=/tmp/jaxpp"
says "apt-get install libjansson-dev python3-dev" /v/bin/pip install --quiet /src
line=$(grep -o 'apt-get install [a-z0-9 -]*' "$root/said" | head -n 1)

echo "--- $line"
in_root "$root" sh -c "apt-get update -q && $line -q -y --no-install-recommends" > "$root/said"

echo "--- pip install ."
in_root "$root" /v/bin/pip install --quiet /src
trains /v

echo "--- pip install --no-deps ."
in_root "$root" /v/bin/pip uninstall --quiet -y jaxpp-c
in_root "$root" /v/bin/pip install --quiet --no-deps /src
trains /v

echo "--- pip install --no-build-isolation --editable ."
in_root "$root" /v/bin/pip uninstall --quiet -y jaxpp-c
in_root "$root" /v/bin/pip install --quiet "meson-python>=0.18" "meson>=1.4" ninja \
  xla-cpu-pjrt==0.0.1 libucx-cu13
in_root "$root" sh -c "PATH=/v/bin:\$PATH /v/bin/pip install --quiet --no-build-isolation -e /src"
trains /v
in_root "$root" sh -c "echo '__import__(\"builtins\").was_edited = 1' >> /src/python/jaxpp/__init__.py"
in_root "$root" sh -c "cd / && PATH=/v/bin:\$PATH /v/bin/python -c 'import jaxpp; was_edited'"
in_root "$root" git -C /src checkout -q python 2>/dev/null || cp \
  "$source/python/jaxpp/__init__.py" "$root/src/python/jaxpp/__init__.py"

echo "--- make install PREFIX=/opt/jaxpp"
in_root "$root" make -C /src install PREFIX=/opt/jaxpp > "$root/said"
in_root "$root" /opt/jaxpp/bin/jaxpp simulate zb-h1 --stages=4 --ranks=4 --microbatches=8 | head -3
in_root "$root" sh -c 'cd /src/examples/c && export PKG_CONFIG_PATH=/opt/jaxpp/lib/pkgconfig &&
  gcc -o /own_schedule own_schedule.c $(pkg-config --cflags --libs jaxpp) &&
  LD_LIBRARY_PATH=/opt/jaxpp/lib /own_schedule' | tail -2
echo "every way works on $release"

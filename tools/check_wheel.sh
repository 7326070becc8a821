#!/bin/sh
# Tries a wheel as on a machine that has neither compiler nor libjansson.
#
#   tools/check_wheel.sh WHEEL            in a new virtual environment
#   tools/check_wheel.sh WHEEL FOLDER     as root: on a bare Debian 12 with Python, in FOLDER
#
# Checks that the wheel's libraries and command need no library but those that every Linux
# has and hold nothing that only tests use, installs it, runs the command, trains the step
# of the README.
set -eu
. "$(dirname "$0")/debian_root.sh"

[ $# = 1 ] || [ $# = 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# = 1 ] || own_mounts "$@"
[ -f "$1" ] || fail "no wheel $1"
source=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

# What a manylinux wheel may take from the system; libjansson it brings along.
python3 -m zipfile -e "$1" "$place/files"
needed=$(find "$place/files" -type f -exec sh -c 'readelf -d "$1" 2>/dev/null' _ {} \; |
  sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u)
[ -n "$needed" ] || fail "the wheel has no binaries"
for library in $needed; do
  [ -z "$(find "$place/files" -name "$library")" ] ||
    needed=$(echo "$needed" | grep -vxF "$library")
done
other=$(echo "$needed" | grep -vxE 'lib(c|m|dl|pthread|rt)\.so\.[0-9]+|ld-linux-x86-64\.so\.2' || true)
[ -z "$other" ] || fail "the wheel needs $other of the system"

found=$(grep -rlE 'jpp_fake_|jpp_client_create_fake|nccl-fake|jpp_bare_|JPP_TEST_' "$place/files" || true)
[ -z "$found" ] || fail "what only tests use is in $found"

mkdir "$place/try"
cp "$1" "$place/try"
sed -n '/^```python$/,/^```$/p' "$source/README.md" | sed '/^```/d' > "$place/try/step.py"
cat > "$place/try/run.sh" <<'RUN'
set -eu
cd "$(dirname "$0")"
python3 -m venv venv
venv/bin/pip install --quiet ./*.whl
venv/bin/jaxpp --version
venv/bin/jaxpp simulate zb-h1 --stages=4 --ranks=4 --microbatches=8
venv/bin/jaxpp schedule list --json >/dev/null
venv/bin/python -c 'import jaxpp; print(jaxpp.__version__)'
venv/bin/python step.py
RUN
if [ $# = 1 ]; then
  sh "$place/try/run.sh"
else
  open_root bookworm "$2" python3,python3-venv
  rm -rf "$2/try"
  cp -r "$place/try" "$2/try"
  ! in_root "$2" sh -c 'command -v cc gcc clang || ls /usr/lib/*/libjansson*' 2>/dev/null ||
    fail "$2 has a compiler or libjansson"
  in_root "$2" sh /try/run.sh
fi
echo "the wheel works; it needs" $needed

#!/bin/sh
# Installs the Debian packages that the build needs, or prints the line that does.
# `system_packages.sh library`: only those of the C library and its command.
set -eu

missing=""
need() { # need PACKAGE COMMAND...: the package if the command fails
  package=$1
  shift
  "$@" >/dev/null 2>&1 || missing="$missing $package"
}

has_header() { echo "#include <$1>" | cc -E -x c - ; }
has_fuzzer() { # libFuzzer and the sanitizers' runtimes
  program=$(mktemp) || return 1
  echo "int LLVMFuzzerTestOneInput(void* d, int n) { return !d + n < 0; }" |
    clang -fsanitize=fuzzer,address,undefined -x c -o "$program" -
  found=$?
  rm -f "$program"
  return $found
}
has_python_headers() {
  python3 -c "import os, sysconfig as s; os.stat(s.get_path('include') + '/Python.h')"
}

need gcc command -v cc
need libc6-dev has_header stdio.h
need libjansson-dev has_header jansson.h
need pkg-config command -v pkg-config
need python3-venv python3 -c "import ensurepip, venv"
if [ "${1:-}" != library ]; then
  need g++ command -v c++
  need cmake command -v cmake
  need libcmocka-dev sh -c "printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <cmocka.h>\n' | cc -E -x c -"
  need clang command -v clang
  need libclang-rt-dev has_fuzzer
  need python3-dev has_python_headers
fi

[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q >/dev/null
  # shellcheck disable=SC2086
  apt-get install -q -y --no-install-recommends $missing >/dev/null
else
  echo "Debian packages are missing. Run this line, then make again:" >&2
  echo "  sudo apt-get install -y$missing" >&2
  exit 1
fi

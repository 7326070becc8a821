#!/bin/sh
# What every base image needs, on Ubuntu 22.04 and later or Debian 12 and later: the packages of
# the build, and in /opt/venv JAX and all that pyproject.toml asks for.
#
#   install_base.sh EXTRA PYPROJECT
#
# EXTRA is what JAX calls the devices: cuda12, cuda13, rocm7-local.
set -eu
extra=$1 pyproject=$2

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
install() { apt-get install -y --no-install-recommends "$@"; }
install python3
python=python3
python3 -c "import sys; sys.exit(sys.version_info < (3, 11))" || python=python3.11 # 22.04
install "$python-venv" "$python-dev" ca-certificates gcc g++ git libc6-dev libcmocka-dev \
  libjansson-dev make pkg-config
rm -rf /var/lib/apt/lists/*

"$python" -m venv /opt/venv
/opt/venv/bin/python - "$pyproject" > /tmp/requirements.txt << 'END'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    found = tomllib.load(file)
project = found["project"]
wanted = found["build-system"]["requires"] + project["dependencies"]
print(*wanted, *project["optional-dependencies"]["test"], sep="\n")
END
/opt/venv/bin/python -m pip install --no-cache-dir "jax[$extra]" -r /tmp/requirements.txt
rm /tmp/requirements.txt

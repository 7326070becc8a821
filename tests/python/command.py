"""The `jaxpp` command that was installed with the package under test."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys


def jaxpp_command() -> str:
    beside = pathlib.Path(sys.executable).parent
    found = shutil.which("jaxpp", path=f"{beside}:{os.environ['PATH']}")
    assert found, "no jaxpp command beside the interpreter or on PATH"
    return found

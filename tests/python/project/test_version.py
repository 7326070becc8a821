"""The version is defined in meson.build; all other places derive theirs from it."""

import importlib.metadata
import re

import jaxpp
from locations import ROOT


def test_version_is_that_of_the_build() -> None:
    text = (ROOT / "meson.build").read_text()
    (version,) = re.findall(r"^  version: '([\d.]+)',$", text, re.M)
    assert jaxpp.__version__ == version
    assert importlib.metadata.version("jaxpp-c") == version

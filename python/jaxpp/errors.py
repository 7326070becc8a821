"""The one exception class of this package."""

from __future__ import annotations

from jaxpp._core import JaxppError

__all__ = ["JaxppError", "make_error"]


def make_error(code: str, message: str) -> JaxppError:
    """An error to raise. `code` is one of the names in `jaxpp/status.h`."""
    error = JaxppError(message)
    error.code = code
    return error

"""The names that scripts import from `jaxpp.arrayref`."""

from jaxpp.array import ArrayRef

__all__ = ["ArrayRef"]

"""Pytree structures and static values as JSON.

Unpickling a file can execute arbitrary code, so this format stores builtin containers and plain
values directly. Other pytree types, named tuples and registered classes are stored by import
name, with JAX's node data.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.arrays import node_of_tree, tree_of_node

__all__ = ["EncodingError", "decode_tree", "decode_value", "encode_tree", "encode_value"]


class EncodingError(Exception):
    """A value cannot be stored."""


# --- Types by name ----------------------------------------------------------------------


def _import_type(name: str) -> Any:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _type_name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__":
        raise EncodingError(
            f"class {kind.__qualname__} is defined in __main__, which other programs cannot "
            "import; define it in a module"
        )
    try:
        same = _import_type(name) is kind
    except (ImportError, AttributeError):
        same = False
    if not same:
        raise EncodingError(
            f"module {kind.__module__} has no class at its top level as {kind.__qualname__}; "
            "define the class at the top of a module"
        )
    return name


# --- Values -----------------------------------------------------------------------------


def encode_value(value: Any) -> Any:
    """Encodes a plain value: None, a bool, number or string, tuples, lists and dicts of
    these, a spec, a dtype or a class. Raises EncodingError for anything else."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, PartitionSpec):
        sums = [sorted(axes) for axes in (value.unreduced, value.reduced)]
        parts = [encode_value(part) for part in value.partitions]
        return {"spec": parts} if not any(sums) else {"summed_spec": [parts, *sums]}
    if type(value) is tuple:
        return {"tuple": [encode_value(part) for part in value]}
    if type(value) is list:
        return {"list": [encode_value(part) for part in value]}
    if type(value) is dict:
        return {"dict": [[encode_value(k), encode_value(v)] for k, v in value.items()]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, type):
        return {"type": _type_name(value)}
    raise EncodingError(
        f"{shorten(value)} of type {type(value).__name__} cannot be stored; expected None, a "
        "number, text, a class, or tuples, lists and dicts of these"
    )


def decode_value(json: Any) -> Any:
    """The inverse of `encode_value`."""
    if not isinstance(json, dict):
        return json
    ((kind, data),) = json.items()
    if kind == "type":
        return _import_type(data)
    if kind == "dtype":
        return np.dtype(data)
    if kind == "dict":
        return {decode_value(k): decode_value(v) for k, v in data}
    if kind == "summed_spec":
        partitions, unreduced, reduced = data
        own = map(decode_value, partitions)
        return PartitionSpec(*own, unreduced=set(unreduced), reduced=set(reduced))
    parts = [decode_value(part) for part in data]
    if kind == "spec":
        return PartitionSpec(*parts)
    return tuple(parts) if kind == "tuple" else parts


# --- Trees ------------------------------------------------------------------------------

_LEAF = jax.tree.structure(0)
_BUILTIN = {kind.__name__: kind for kind in (tuple, list, dict, type(None))}


def _encode_node(tree: Any) -> Any:
    node, children = node_of_tree(tree)
    if node is None:
        return "*"
    kind, data = node
    known = _BUILTIN.get(kind.__name__) is kind
    name = kind.__name__ if known else _type_name(kind)
    return [name, encode_value(data), [_encode_node(child) for child in children]]


def encode_tree(tree: Any, what: str) -> Any:
    """Encodes a treedef; a leaf is a star. Raises JaxppError("unsupported") about `what`."""
    try:
        return _encode_node(tree)
    except EncodingError as error:
        raise make_error(
            "unsupported", f"save: {what} cannot be written to a plan file: {error}"
        ) from None


def decode_tree(json: Any) -> Any:
    """The inverse of `encode_tree`. Raises ImportError, AttributeError or ValueError if a type
    no longer exists or is not a pytree."""
    if json == "*":
        return _LEAF
    name, data, children = json
    kind = _BUILTIN.get(name) or _import_type(name)
    return tree_of_node((kind, decode_value(data)), [decode_tree(child) for child in children])

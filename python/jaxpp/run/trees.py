"""The structure of pytrees, and what stands beside arrays, as JSON.

A file that holds a pickle runs what it pleases when it is read. This form has the builtin
containers and plain values themselves; other types of pytrees, named tuples and registered
classes, by the name that they are imported by, and the data that JAX keeps of them.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.arrays import node_of_tree, tree_of_node

__all__ = ["CannotTravel", "decode_tree", "decode_value", "encode_tree", "encode_value"]


class CannotTravel(Exception):
    """Why something has no such form."""


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
        raise CannotTravel(
            f"the class {kind.__qualname__} is one of the program itself, which no other can "
            "import; define it in a module"
        )
    try:
        same = _import_type(name) is kind
    except (ImportError, AttributeError):
        same = False
    if not same:
        raise CannotTravel(
            f"{kind.__qualname__} is not what module {kind.__module__} has under that name; "
            "define the class at the top of a module"
        )
    return name


# --- Values -----------------------------------------------------------------------------


def encode_value(value: Any) -> Any:
    """A plain value: None, a bool, number or text, tuples, lists and dicts of them, a spec,
    a dtype, a class. Raises CannotTravel for anything else."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, PartitionSpec):
        return {"spec": [encode_value(part) for part in value]}
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
    raise CannotTravel(
        f"{shorten(value)} of type {type(value).__name__} has no form there; expected None, a "
        "number, text, a class, or tuples, lists and dicts of these"
    )


def decode_value(json: Any) -> Any:
    """What `encode_value` was given."""
    if not isinstance(json, dict):
        return json
    ((kind, data),) = json.items()
    if kind == "type":
        return _import_type(data)
    if kind == "dtype":
        return np.dtype(data)
    if kind == "dict":
        return {decode_value(k): decode_value(v) for k, v in data}
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
    """A treedef; a leaf is a star. Raises JaxppError("unsupported"), about `what`."""
    try:
        return _encode_node(tree)
    except CannotTravel as error:
        raise make_error(
            "unsupported", f"save: {what} can not be written to a plan file: {error}"
        ) from None


def decode_tree(json: Any) -> Any:
    """What `encode_tree` was given. Raises ImportError, AttributeError or ValueError where a
    type is not there any more or is no pytree."""
    if json == "*":
        return _LEAF
    name, data, children = json
    kind = _BUILTIN.get(name) or _import_type(name)
    return tree_of_node((kind, decode_value(data)), [decode_tree(child) for child in children])

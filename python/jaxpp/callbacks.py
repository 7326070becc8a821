"""Python functions that tasks call: `jax.debug.print`, `jax.debug.callback`,
`jax.pure_callback` and `jax.experimental.io_callback`.

JAX lowers all of them to a custom call whose handler takes the function from a table that
only JAX's own client has. The plugin gets the C library's handler under the same name (XLA
knows it, and gives such a call to one device of several), which takes the function from the
address that `redirect_callbacks` puts into an attribute.
"""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax._src import effects
from jax._src.interpreters import mlir
from jax.extend.core import JaxprEqn
from jaxlib.mlir import ir

from jaxpp import _core
from jaxpp.errors import make_error, where_raised

__all__ = ["TARGET", "check_callback", "redirect_callbacks"]

TARGET = "xla_ffi_python_cpu_callback"
_PRIMITIVES = {"debug_callback", "debug_print", "io_callback", "pure_callback"}

# Elements of an operand: (dtype, shape).
_Type = tuple[Any, tuple[int, ...]]

atexit.register(_core.callbacks_close)


@dataclasses.dataclass(frozen=True)
class _Function:
    """What `_core.Callback` calls: `function` on arrays instead of views of memory."""

    function: Callable[..., Sequence[Any]]
    operands: tuple[_Type, ...]
    results: tuple[_Type, ...]

    def __call__(self, *views: memoryview) -> str | None:
        types = (*self.operands, *self.results)
        arrays = [
            np.frombuffer(view, dtype).reshape(shape)
            for view, (dtype, shape) in zip(views, types, strict=True)
        ]
        taken, given = arrays[: len(self.operands)], arrays[len(self.operands) :]
        try:
            # The memory is the device's: what the function keeps must be its own.
            for array, value in zip(given, self.function(*map(np.array, taken)), strict=True):
                array[...] = value
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            where = where_raised(error.__traceback__)
            return f"the callback raised {type(error).__name__}: {error} (at {where})"
        return None


def _types(values: Any, dtypes: dict[str, Any]) -> tuple[_Type, ...]:
    found = []
    for value in values:
        type_ = ir.RankedTensorType(value.type)
        name = str(type_.element_type)
        if name not in dtypes:
            raise make_error(
                "unsupported",
                f"a callback into Python takes or gives elements of type {name}; expected one "
                f"of {', '.join(dtypes)}. Convert before and after it",
            )
        found.append((dtypes[name], tuple(type_.shape)))
    return tuple(found)


def _numpy_dtypes() -> dict[str, Any]:
    """By name in MLIR, what a whole number of bytes holds. In the module's context."""
    kinds = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    floats = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
    eighths = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    dtypes = map(np.dtype, (*kinds, *floats, *eighths))
    return {str(mlir.dtype_to_ir_type(dtype)): dtype for dtype in dtypes}


def _callback_ops(op: Any) -> Iterator[Any]:
    """Those in an operation; MLIR's own walk makes a RuntimeError of a Ctrl-C in it."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if (
                    inner.operation.name == "stablehlo.custom_call"
                    and inner.attributes["call_target_name"].value == TARGET
                ):
                    yield inner
                yield from _callback_ops(inner)


def redirect_callbacks(
    module: Any, functions: Sequence[Callable[..., Any]]
) -> tuple[_core.Callback, ...]:
    """Makes a module's callbacks ours.

    Args:
      module: StableHLO as JAX lowered it; changed in place.
      functions: what JAX would put into its client's table for this module.

    Returns:
      What the executable must keep alive.
    """
    if not functions:
        return ()
    callbacks = []
    with module.context:
        dtypes = _numpy_dtypes()
        for op in list(_callback_ops(module.operation)):
            index = ir.IntegerAttr(op.attributes["mhlo.backend_config"]["index"]).value
            operands, results = _types(op.operands, dtypes), _types(op.results, dtypes)
            function = _Function(functions[index], operands, results)
            sizes = [[d.itemsize for d, _ in types] for types in (operands, results)]
            callback = _core.Callback(function, *sizes)
            u64 = ir.IntegerType.get_unsigned(64)
            address = ir.IntegerAttr.get(u64, callback.address())
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get({"callback": address})
            callbacks.append(callback)
    return tuple(callbacks)


def check_callback(eqn: JaxprEqn, where: str | None) -> None:
    """Refuses a callback that must be ordered or run a shard at a time ("unsupported")."""
    if eqn.primitive.name not in _PRIMITIVES:
        return
    found = {
        "ordered": any(map(effects.ordered_effects.contains, eqn.effects)),
        "partitioned": eqn.params.get("partitioned", False),
    }
    for option, given in found.items():
        if given:
            raise make_error(
                "unsupported",
                f"{eqn.primitive.name} at {where}: expected {option}=False, found True. Tasks "
                "of several ranks run at the same time, each on all devices of its rank: "
                "print what tells the lines apart (the microbatch, the stage)",
            )

"""Python functions that tasks call: `jax.debug.print`, `jax.debug.callback`,
`jax.pure_callback` and `jax.experimental.io_callback`.

JAX lowers all of them to a custom call whose handler takes the function from a table that
only JAX's own client has. The plugin gets the C library's handler, which takes the function
from the address that `redirect_callbacks` puts into an attribute.

Its name is that of JAX's handler on the host, for accelerators too. XLA knows the name, and
gives such a call to one device of several; and JAX has not taken it on accelerators, where
its client and the runtime's share a plugin and with it the handlers.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpp import _core
from jaxpp.errors import make_error, plain_text, raised_text, where_raised
from jaxpp.jax_internals.modules import LoweredModule, element_type_name, replace_addresses

__all__ = ["TARGET", "Callback", "Function", "redirect_callbacks", "renew_callbacks"]

TARGET = "xla_ffi_python_cpu_callback"
_TARGETS_OF_JAX = (TARGET, "xla_ffi_python_gpu_callback")

# Elements of an operand: (dtype, shape).
_Type = tuple[Any, tuple[int, ...]]

# The last one registered runs first: steps under way may still call back.
atexit.register(_core.callbacks_close)
atexit.register(_core.runtimes_close)


@dataclasses.dataclass(frozen=True)
class Function:
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
            return plain_text(f"the callback raised {raised_text(error)} (at {where})")
        return None


def _types(named: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[_Type, ...]:
    dtypes = _numpy_dtypes()
    found = []
    for name, shape in named:
        if name not in dtypes:
            raise make_error(
                "unsupported",
                f"a callback into Python takes or gives elements of type {name}; expected one "
                f"of {', '.join(dtypes)}. Convert before and after it",
            )
        found.append((dtypes[name], shape))
    return tuple(found)


@functools.cache
def _numpy_dtypes() -> dict[str, Any]:
    """By name in MLIR, what a whole number of bytes holds."""
    kinds = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    floats = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
    fours = ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz")
    eighths = (*fours, "e5m2", "e5m2fnuz", "e8m0fnu")
    dtypes = map(np.dtype, (*kinds, *floats, *(f"float8_{e}" for e in eighths)))
    return {element_type_name(dtype): dtype for dtype in dtypes}


class Callback(NamedTuple):
    """A function, and the object whose address a module has."""

    function: Function
    object: _core.Callback

    @classmethod
    def of(cls, function: Function) -> Callback:
        types = function.operands, function.results
        sizes = [[dtype.itemsize for dtype, _ in each] for each in types]
        return cls(function, _core.Callback(function, *sizes))


def _make_callback(
    function: Callable[..., Any], operands: Any, results: Any
) -> tuple[Callback, int]:
    callback = Callback.of(Function(function, _types(operands), _types(results)))
    return callback, callback.object.address()


def redirect_callbacks(module: LoweredModule) -> tuple[Callback, ...]:
    """Makes a module's callbacks ours, in place. Returns what its executable must keep
    alive."""
    if not module.callback_functions:
        return ()
    attribute = _core.CALLBACK_ATTRIBUTE
    return tuple(module.redirect_callbacks(_TARGETS_OF_JAX, TARGET, attribute, _make_callback))


def renew_callbacks(
    code: bytes, functions: Mapping[int, Function]
) -> tuple[bytes, tuple[Callback, ...]]:
    """The code of a module that was redirected in another process, for this one; and what its
    executable must keep alive. `functions`: by their addresses there."""
    made = {address: Callback.of(function) for address, function in functions.items()}
    addresses = {address: callback.object.address() for address, callback in made.items()}
    code = replace_addresses(code, TARGET, _core.CALLBACK_ATTRIBUTE, addresses)
    return code, tuple(made.values())

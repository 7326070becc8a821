"""Python functions that tasks call: `jax.debug.print`, `jax.debug.callback`,
`jax.pure_callback` and `jax.experimental.io_callback`.

JAX lowers all of them to a custom call whose handler looks the function up in a table of JAX's
own client. This library registers its own handler with the plugin; it takes the function from
an address that `redirect_callbacks` stores in an attribute.

It uses the name of JAX's handler for the host, also on accelerators. XLA recognises the name
and places the call on a single device. JAX does not register this name on accelerators, where
its client and the runtime's share the plugin and its handlers.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpp import _core
from jaxpp.errors import make_error, plain_text, raised_text, where_raised
from jaxpp.jax_internals.modules import LoweredModule, element_type_name, replace_addresses

__all__ = ["TARGET", "Callback", "Function", "redirect_callbacks", "renew_callbacks"]

TARGET = "xla_ffi_python_cpu_callback"
_TARGETS_OF_JAX = (TARGET, "xla_ffi_python_gpu_callback")

_log = logging.getLogger("jaxpp")

# Elements of an operand: (dtype, shape).
_Type = tuple[Any, tuple[int, ...]]

# Exit hooks run in reverse order: steps in flight may still call back.
atexit.register(_core.callbacks_close)
atexit.register(_core.runtimes_close)


@dataclasses.dataclass(frozen=True)
class Function:
    """Adapts `function` for `_core.Callback`: converts views of memory to arrays."""

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
            # Copy: the memory belongs to the device, and the function may keep its arguments.
            for array, value in zip(given, self.function(*map(np.array, taken)), strict=True):
                array[...] = value
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            where = where_raised(error.__traceback__)
            text = plain_text(f"the callback raised {raised_text(error)} (at {where})")
            # If other devices of the rank wait for this one in a collective, XLA ends the
            # process before the step can report the exception.
            _log.error("%s", text)
            return text
        return None


def _types(named: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[_Type, ...]:
    dtypes = _numpy_dtypes()
    found = []
    for name, shape in named:
        if name not in dtypes:
            raise make_error(
                "unsupported",
                f"a callback into Python takes or returns elements of type {name}; expected "
                f"one of {', '.join(dtypes)}. Convert them before and after the callback",
            )
        found.append((dtypes[name], shape))
    return tuple(found)


@functools.cache
def _numpy_dtypes() -> dict[str, Any]:
    """The byte-sized dtypes, by their names in MLIR."""
    kinds = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    floats = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
    fours = ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz")
    eighths = (*fours, "e5m2", "e5m2fnuz", "e8m0fnu")
    dtypes = map(np.dtype, (*kinds, *floats, *(f"float8_{e}" for e in eighths)))
    return {element_type_name(dtype): dtype for dtype in dtypes}


class Callback(NamedTuple):
    """A function, and the object whose address is in a module."""

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
    """Redirects a module's callbacks to this library's handler, in place. Returns the objects
    that the executable must keep alive."""
    if not module.callback_functions:
        return ()
    attribute = _core.CALLBACK_ATTRIBUTE
    return tuple(module.redirect_callbacks(_TARGETS_OF_JAX, TARGET, attribute, _make_callback))


def renew_callbacks(
    code: bytes, functions: Mapping[int, Function]
) -> tuple[bytes, tuple[Callback, ...]]:
    """The code of a module that another process redirected, adapted to this process, and the
    objects that its executable must keep alive. `functions`: by their addresses there."""
    made = {address: Callback.of(function) for address, function in functions.items()}
    addresses = {address: callback.object.address() for address, callback in made.items()}
    code = replace_addresses(code, TARGET, _core.CALLBACK_ATTRIBUTE, addresses)
    return code, tuple(made.values())

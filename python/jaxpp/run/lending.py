"""Arrays that JAX's client and the runtime's use in the same memory, by DLPack."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _core
from jaxpp.run.plugins import platform_of

__all__ = ["DEVICE_TYPES", "Lent", "can_share", "capsules_of", "lent_array"]

# What DLPack calls the devices of a platform.
DEVICE_TYPES = {"cpu": 1, "cuda": 2, "rocm": 10}


def can_share(given: jax.Device, wanted: jax.Device) -> bool:
    """Whether what lies on one device of JAX's can be used on another one as it is: all CPU
    devices have the same memory."""
    return given == wanted or given.platform == wanted.platform == "cpu"


def capsules_of(arrays: list[jax.Array]) -> list[Any] | None:
    """JAX's hold of each array's memory, which stays as it is meanwhile; None for types that
    DLPack does not have, and for memory beside the devices' own. Waits for the contents."""
    if not all(map(_is_in_own_memory, arrays)):
        return None
    try:
        return [_kept(array).__dlpack__() for array in arrays]
    except (RuntimeError, TypeError, ValueError, BufferError):
        return None  # what is wrong with an array is found again when it is copied


def _kept(array: jax.Array) -> jax.Array:
    """An array that its owner does not donate while somebody holds its memory: on CPUs JAX
    then copies it, on accelerators it refuses."""
    if platform_of(next(iter(array.devices()))) == "cpu":
        return array
    return _copy(array)


def _copy(array: jax.Array) -> jax.Array:
    """On its own device, done."""
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jnp.array(array, copy=True).block_until_ready()


def _is_in_own_memory(array: jax.Array) -> bool:
    kind = array.sharding.memory_kind
    return kind is None or kind == next(iter(array.devices())).default_memory().kind


def lent_array(
    value: _core.Value, rank: int, index: int, device: jax.Device
) -> np.ndarray | jax.Array | None:
    """One shard of a value as JAX can use it: on the host as an array of bytes, which may be
    kept; on another device as an array of JAX's own."""
    platform = platform_of(device)
    if platform not in DEVICE_TYPES:
        return None
    on_host = platform == "cpu"
    where = DEVICE_TYPES[platform], 0 if on_host else device.local_hardware_id
    capsule = value.lend(rank, index, *where, on_host)
    if capsule is None:
        return None
    lent = Lent(capsule, where)
    if not on_host:
        return _copied_on_device(lent)
    array = np.from_dlpack(lent)
    array.flags.writeable = False
    return array


def _copied_on_device(lent: Lent) -> jax.Array | None:
    # JAX may end the loan when it has only queued what reads the memory, and the next step
    # would write there. So the loan ends here, after a copy that is done.
    try:
        return _copy(jax.dlpack.from_dlpack(lent))
    except (RuntimeError, TypeError, ValueError, BufferError):
        return None


class Lent:
    """A capsule with the methods by which its consumers ask for it."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

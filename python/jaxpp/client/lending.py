"""Arrays that JAX's client and the runtime's client share in the same memory through
DLPack."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _core
from jaxpp.client.plugins import platform_of

__all__ = ["DEVICE_TYPES", "Lent", "can_share", "capsules_of", "lent_array"]

# The DLPack device type of each platform.
DEVICE_TYPES = {"cpu": 1, "cuda": 2, "rocm": 10}


def can_share(given: jax.Device, wanted: jax.Device) -> bool:
    """Whether memory of one JAX device can be used on another one without a copy: all CPU
    devices share one memory."""
    return given == wanted or given.platform == wanted.platform == "cpu"


def capsules_of(arrays: list[jax.Array]) -> list[Any] | None:
    """A DLPack export of each array, which pins its memory; None for types that DLPack does not
    support and for arrays outside the default device memory. Waits for the contents."""
    if not all(map(_is_in_own_memory, arrays)):
        return None
    try:
        return [_kept(array).__dlpack__() for array in arrays]
    except (RuntimeError, TypeError, ValueError, BufferError):
        return None  # the copy reports the same error again


def _kept(array: jax.Array) -> jax.Array:
    """An array whose memory is shared: JAX copies it instead of donating it on CPUs, and
    refuses to donate it on accelerators."""
    if platform_of(next(iter(array.devices()))) == "cpu":
        return array
    return _copy(array)


def _copy(array: jax.Array) -> jax.Array:
    """The array on its own device, after its computation has finished."""
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jnp.array(array, copy=True).block_until_ready()


def _is_in_own_memory(array: jax.Array) -> bool:
    kind = array.sharding.memory_kind
    return kind is None or kind == next(iter(array.devices())).default_memory().kind


def lent_array(
    value: _core.Value, rank: int, index: int, device: jax.Device
) -> np.ndarray | jax.Array | None:
    """One shard of a value for JAX: on the host an array of bytes, which the caller may keep;
    on other devices a JAX array."""
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
    # JAX may release the memory when its reads are only queued, and the next step would
    # overwrite it. So make a copy and wait for it before releasing the memory.
    try:
        return _copy(jax.dlpack.from_dlpack(lent))
    except (RuntimeError, TypeError, ValueError, BufferError):
        return None


class Lent:
    """A DLPack capsule with the methods that consumers call."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

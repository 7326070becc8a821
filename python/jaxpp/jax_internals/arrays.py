"""JAX's arrays, shardings and pytrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import api as jax_api
from jax._src import core as jax_core
from jax._src import dtypes as jax_dtypes
from jax._src import pjit
from jax._src.core import ShardingTypeError
from jax._src.interpreters import mlir, pxla
from jax._src.numpy import array_methods
from jax._src.tree_util import broadcast_prefix
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = [
    "ShardingTypeError",
    "as_addend",
    "as_reduced",
    "broadcast_prefix",
    "explicit_sharding",
    "is_cut_along",
    "jax_array",
    "keeps_its_sharding",
    "key_implementation",
    "node_of_tree",
    "on_one_mesh",
    "sharded_like",
    "tree_of_node",
    "unreduced_axes",
    "wrap_keys",
]

# --- Arrays and shardings ---------------------------------------------------------------


# JAX 0.10.2, 0.11.2: array_methods._set_array_base_attributes; core.pytype_aval_mappings,
# dtypes.register_canonicalize_value_handler, pxla.shard_arg_handlers and shard_args,
# mlir.register_constant_handler and get_constant_handler; pjit.convert_to_metaty, which reads
# the shardings of a jit's arguments, and create_meta_ty; `_committed`, which pins an array to
# its devices; the `_impl` and `_base_array` of PRNG keys; api._device_get, which
# jax.device_get calls for each leaf, and which takes keys apart by their class.
def jax_array(cls: Any) -> Any:
    """Registers a class as a subclass of `jax.Array` that JAX's functions accept.

    It inherits the operators and methods of JAX's own arrays, unless it defines them. Its
    `aval` is the abstract value, without a sharding. Each JAX computation that takes it calls
    `_for_jax()` for the contents, a numpy array or an array of JAX's own.
    """
    array_methods._set_array_base_attributes(cls, exclude=set(vars(cls)))
    cls._committed = cls.committed = False
    cls._impl = property(lambda keys: keys.dtype._impl)
    cls._base_array = property(lambda keys: keys._for_jax()._base_array)
    convert = pjit.convert_to_metaty

    def type_in_jit(array: Any) -> Any:
        if type(array) is cls:  # a tracer has no devices
            return pjit.create_meta_ty(array.aval, None, None, True, False)
        return convert(array)

    pjit.convert_to_metaty = type_in_jit
    get = jax_api._device_get

    def get_from_device(leaf: Any) -> Any:
        if type(leaf) is cls and key_implementation(leaf.dtype):
            return get(leaf._for_jax())
        return get(leaf)

    jax_api._device_get = get_from_device

    def upload(arrays: Any, shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        contents = [array._for_jax() for array in arrays]
        return pxla.shard_args(shardings, layouts, copy_semantics, contents)

    def constant(array: Any, aval: Any) -> Any:
        contents = array._for_jax()
        return mlir.get_constant_handler(type(contents))(contents, aval)

    jax_core.pytype_aval_mappings[cls] = lambda array: array.aval
    jax_dtypes.register_canonicalize_value_handler(cls, None)
    pxla.shard_arg_handlers[cls] = upload
    mlir.register_constant_handler(cls, constant)
    return cls


# JAX 0.10.2, 0.11.2: pxla._orig_out_sharding_handlers, by the exact type of a sharding.
def keeps_its_sharding(cls: type[NamedSharding]) -> type[NamedSharding]:
    """Registers a subclass of NamedSharding, so that the results that `jax.jit` computes
    from such arrays have a NamedSharding over the same mesh."""
    handlers = pxla._orig_out_sharding_handlers
    handlers[cls] = handlers[NamedSharding]
    return cls


# JAX 0.10.2, 0.11.2: the sharding of an array's type; its mesh is empty unless the array
# is on an explicit mesh.
def on_one_mesh(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two arrays; if only one has the type of an explicit mesh, both get its sharding, or
    both are whole on that mesh if their shapes differ."""
    shardings = [jax.typeof(x).sharding for x in (a, b)]
    if shardings[0].mesh.empty == shardings[1].mesh.empty:
        return a, b
    common = shardings[0] if shardings[1].mesh.empty else shardings[1]
    if a.shape != b.shape or common.spec.unreduced:
        common = NamedSharding(common.mesh, PartitionSpec())
    return jax.reshard(a, common), jax.reshard(b, common)


# JAX 0.10.2, 0.11.2: the sharding of an array's type, as above.
def explicit_sharding(aval: Any, mesh: Mesh) -> NamedSharding | None:
    """The sharding on a mesh that a value's type includes; None if the type has none."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or not sharding.mesh.are_all_axes_explicit:
        return None
    return NamedSharding(mesh, sharding.spec)


# JAX 0.10.2, 0.11.2: the sharding of an array's type, as above.
def sharded_like(array: jax.Array, aval: Any) -> jax.Array:
    """The array with the sharding in the type of a value, if axes are explicit."""
    sharding = aval.sharding
    if sharding.mesh.empty or jax.typeof(array).sharding == sharding:
        return array
    return jax.reshard(array, sharding)


# JAX 0.10.2, 0.11.2: the sharding of an array's type, as above.
def is_cut_along(array: Any, axis: int) -> bool:
    """Whether the type of an array says that explicit axes shard it along an axis."""
    partitions = jax.typeof(array).sharding.spec.partitions
    return -len(partitions) <= axis < len(partitions) and partitions[axis] is not None


# JAX 0.10.2, 0.11.2: the unreduced axes in the sharding of an array's type.
def unreduced_axes(aval: Any) -> frozenset[str]:
    """The explicit axes over which each device has one term of a sum."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return frozenset(spec.unreduced) if spec is not None else frozenset()


# JAX 0.10.2, 0.11.2: the sharding of an array's type, as above.
def as_reduced(value: jax.Array) -> jax.Array:
    """The value without unreduced axes: the sum over the devices, if each has one term."""
    if not unreduced_axes(jax.typeof(value)):
        return value
    sharding = jax.typeof(value).sharding
    spec = PartitionSpec(*sharding.spec.partitions, reduced=sharding.spec.reduced)
    return jax.reshard(value, sharding.update(spec=spec))


# JAX 0.10.2, 0.11.2: the sharding of an array's type, as above.
def as_addend(value: jax.Array, state: jax.Array) -> jax.Array:
    """The value with the unreduced axes of the state to which it is added."""
    if unreduced_axes(jax.typeof(state)):
        return jax.reshard(value, jax.typeof(state).sharding)
    return as_reduced(value)


# JAX 0.10.2, 0.11.2: the `_impl` of a key's dtype.
def wrap_keys(data: jax.Array, dtype: Any) -> jax.Array:
    """PRNG keys of the dtype from their data. (`jax.random.key_impl` accepts only arrays.)"""
    return jax.random.wrap_key_data(data, impl=dtype._impl.name)


# --- Pytrees ----------------------------------------------------------------------------


# JAX 0.10.2, 0.11.2: PyTreeDef.node_data and children.
def node_of_tree(tree: Any) -> tuple[Any, list[Any]]:
    """The root of a treedef as (type, data), or None for a leaf, and its children."""
    return tree.node_data(), tree.children()


# JAX 0.10.2, 0.11.2: PyTreeDef.from_node_data_and_children.
def tree_of_node(node: tuple[type, Any], children: Sequence[Any]) -> Any:
    """The inverse of `node_of_tree`; ValueError for a type that is not a registered pytree."""
    try:
        return jax.tree_util.PyTreeDef.from_node_data_and_children(
            jax.tree_util.default_registry, node, children
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from None


# JAX 0.10.2, 0.11.2: the name in a key dtype's _impl.
def key_implementation(dtype: Any) -> str | None:
    """The name of the PRNG implementation of a key dtype; None for other dtypes."""
    return dtype._impl.name if jnp.issubdtype(dtype, jax.dtypes.prng_key) else None

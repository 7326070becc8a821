"""Everything that is taken from JAX's internals or read off the MLIR that JAX lowers to.

JAX promises nothing about what stands here, so this is the one module to look at when a new
release breaks something. A line "JAX 0.10.2, 0.11.2: ..." above a definition names what it
takes from JAX, and the releases of JAX in which that was there and did what is said here.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import (
    api_util,
    clusters,
    config,
    distributed,
    effects,
    pjit,
    source_info_util,
    xla_bridge,
)
from jax._src import core as jax_core
from jax._src import dtypes as jax_dtypes
from jax._src import mesh as mesh_lib
from jax._src import shard_map as shard_map_internals
from jax._src.interpreters import mlir, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.numpy import array_methods
from jax._src.sharding_impls import UNSPECIFIED
from jax._src.tree_util import broadcast_prefix
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxlib import _profiler, xla_client
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo

from jaxpp import _core

# JAX 0.11.2; none in 0.10.2: how a scan says which of its operands are constants and states.
try:
    from jax._src import flattree
except ImportError:
    flattree = None

__all__ = [
    "LoweredModule",
    "add_to_profiles",
    "at_line_of",
    "backends_are_made",
    "broadcast_prefix",
    "changed_jaxpr",
    "changed_scan",
    "context_mesh",
    "coordination",
    "coordination_address",
    "current_line",
    "drop_unused",
    "drop_unused_outputs",
    "element_type_name",
    "gpu_client_options",
    "exclude_from_user_lines",
    "host_call_targets",
    "in_a_job",
    "is_of_a_closed_trace",
    "is_ordered",
    "leave_job_at_once",
    "on_one_mesh",
    "planning_devices",
    "is_tracing",
    "is_transposed",
    "is_unspecified",
    "is_user_file",
    "jax_array",
    "keeps_its_sharding",
    "key_implementation",
    "line_of",
    "name_after",
    "node_of_tree",
    "scan_sizes",
    "serialized_compile_options",
    "settings_key",
    "settings_of",
    "stacked_aval",
    "tree_of_node",
    "user_frames",
    "user_line",
    "without_constants",
    "wrap_keys",
]

# --- Jaxprs -----------------------------------------------------------------------------


# JAX 0.10.2, 0.11.2: partial_eval.dce_jaxpr.
def drop_unused(jaxpr: Jaxpr, used: Sequence[bool] | None = None) -> Jaxpr:
    """The jaxpr without equations that no (used) result needs; its arguments stay."""
    used = [True] * len(jaxpr.outvars) if used is None else list(used)
    return pe.dce_jaxpr(jaxpr, used, instantiate=True)[0]


# JAX 0.10.2, 0.11.2: partial_eval.dce_rules.
def drop_unused_outputs(
    eqn: JaxprEqn, used: Sequence[bool]
) -> tuple[list[bool], JaxprEqn | None]:
    """The equation with its used outputs only, and which of its operands that one takes."""
    rule = pe.dce_rules.get(eqn.primitive)
    if rule is None:
        return [True] * len(eqn.invars), eqn
    return rule(list(used), eqn)


# JAX 0.10.2, 0.11.2: partial_eval.convert_constvars_jaxpr.
def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants as first arguments."""
    return pe.convert_constvars_jaxpr(jaxpr)


# JAX 0.10.2, 0.11.2: Jaxpr.replace, Jaxpr.debug_info.
def changed_jaxpr(closed: ClosedJaxpr, **changes: Any) -> ClosedJaxpr:
    """A jaxpr with other `invars`, `outvars` or `eqns`, of which debug information is
    forgotten."""
    names = closed.jaxpr.debug_info.with_unknown_names()
    return ClosedJaxpr(closed.jaxpr.replace(debug_info=names, **changes), closed.consts)


# JAX 0.10.2, 0.11.2: the sharding of an array's type, its mesh empty where the array is on no
# explicit mesh.
def on_one_mesh(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The arrays; where one has the type of an explicit mesh and the other of none, both of
    that mesh."""
    meshes = [jax.typeof(x).sharding.mesh for x in (a, b)]
    if meshes[0].empty == meshes[1].empty:
        return a, b
    whole = NamedSharding(meshes[0] if meshes[1].empty else meshes[1], PartitionSpec())
    return jax.reshard(a, whole), jax.reshard(b, whole)


# JAX 0.10.2, 0.11.2: the `_impl` of a key's dtype.
def wrap_keys(data: jax.Array, dtype: Any) -> jax.Array:
    """PRNG keys of the dtype from their data: `jax.random.key_impl` takes arrays alone."""
    return jax.random.wrap_key_data(data, impl=dtype._impl.name)


# JAX 0.10.2, 0.11.2: core.unmapped_aval.
def stacked_aval(aval: Any, length: int) -> Any:
    """The abstract value of `length` such values along a new first axis."""
    return jax_core.unmapped_aval(length, 0, aval)


# JAX 0.10.2, 0.11.2: a scan's num_consts and num_carry (0.10.2), or ft_in (0.11.2).
def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants and how many states a scan takes."""
    if flattree is None:
        return params["num_consts"], params["num_carry"]
    consts, states, _ = params["ft_in"].unpack()
    return len(consts), len(states)


# JAX 0.10.2, 0.11.2: as in `scan_sizes`; flattree.nones and flattree.pack (0.11.2).
def changed_scan(
    params: Mapping[str, Any], body: ClosedJaxpr, num_consts: int, num_states: int
) -> dict[str, Any]:
    """The parameters of the scan with this body instead, which takes so many of each."""
    if flattree is None:
        sizes = {"num_consts": num_consts, "num_carry": num_states}
        return {**params, "jaxpr": body, **sizes}
    consts, states = flattree.nones(num_consts), flattree.nones(num_states)
    slices = flattree.nones(len(body.in_avals) - num_consts - num_states)
    stacked = flattree.nones(len(body.out_avals) - num_states)
    ft_in = flattree.pack((consts, states, slices))
    return {**params, "jaxpr": body, "ft_in": ft_in, "ft_out": flattree.pack((states, stacked))}


# JAX 0.10.2, 0.11.2: how autodiff names what it writes in an equation's name stack.
def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether autodiff wrote the equation, in a transposition."""
    return "transpose(" in str(eqn.source_info.name_stack)


# JAX 0.10.2, 0.11.2: the `ctx` of an equation.
def settings_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """The settings of JAX that an equation was traced under, for `with`."""
    return eqn.ctx.manager


# JAX 0.10.2, 0.11.2: sharding_impls.UNSPECIFIED.
def is_unspecified(sharding: Any) -> bool:
    """Whether a jit says nothing about the sharding of an argument or result."""
    return sharding is UNSPECIFIED or sharding is None


# JAX 0.10.2, 0.11.2: effects.ordered_effects.
def is_ordered(effect: Any) -> bool:
    """Whether calls with this effect must keep their order."""
    return effects.ordered_effects.contains(effect)


# --- Arrays and shardings ---------------------------------------------------------------


# JAX 0.10.2, 0.11.2: array_methods._set_array_base_attributes; core.pytype_aval_mappings,
# dtypes.register_canonicalize_value_handler, pxla.shard_arg_handlers and shard_args,
# mlir.register_constant_handler and get_constant_handler; pjit.convert_to_metaty, which looks
# where the arguments of a jit lie, and create_meta_ty; `_committed`, which says that an array
# has to stay there; the `_impl` and `_base_array` of PRNG keys.
def jax_array(cls: Any) -> Any:
    """A class of arrays that JAX's functions take: a subclass of `jax.Array`.

    It gets the operators and methods of JAX's own arrays, unless it defines them. Its `aval`
    is the abstract value, without a sharding. `_for_jax()` is asked for the contents each time
    that a computation of JAX takes it: a numpy array or an array of JAX's own.
    """
    array_methods._set_array_base_attributes(cls, exclude=set(vars(cls)))
    cls._committed = cls.committed = False
    cls._impl = property(lambda keys: keys.dtype._impl)
    cls._base_array = property(lambda keys: keys._for_jax()._base_array)
    convert = pjit.convert_to_metaty

    def type_in_jit(array: Any) -> Any:
        if type(array) is cls:  # as a tracer, it lies nowhere
            return pjit.create_meta_ty(array.aval, None, None, True, False)
        return convert(array)

    pjit.convert_to_metaty = type_in_jit

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
    """A subclass of NamedSharding: what `jax.jit` makes of an array that lies so has a
    NamedSharding too, over the same mesh, as it has where the sharding is a plain one."""
    handlers = pxla._orig_out_sharding_handlers
    handlers[cls] = handlers[NamedSharding]
    return cls


# --- The context mesh -------------------------------------------------------------------

# Where JAX keeps the context mesh: jax._src.config in JAX 0.10.2, jax._src.mesh in 0.11.2.
_contexts = mesh_lib if hasattr(mesh_lib, "abstract_mesh_context_manager") else config

# While a step is traced: the whole mesh, and a rank's, which it stands for.
_meant: contextvars.ContextVar[tuple[Mesh, Mesh] | None] = contextvars.ContextVar(
    "meant", default=None
)


# JAX 0.10.2, 0.11.2: abstract_mesh_context_manager and device_context, states of one thread
# with swap_local and set_local.
@contextlib.contextmanager
def context_mesh(mesh: Mesh | None, whole: Mesh | None = None) -> Iterator[None]:
    """Whatever `jax.set_mesh` said, the context mesh is `mesh`, abstractly, or none.

    `jax.set_mesh` changes more than names: new arrays go to all its devices, and arrays of
    others are refused. Where the function that is traced inside names `whole`, it means
    `mesh`.
    """
    abstract = mesh_lib.empty_abstract_mesh if mesh is None else mesh.abstract_mesh
    abstract_before = _contexts.abstract_mesh_context_manager.swap_local(abstract)
    devices_before = _contexts.device_context.swap_local(mesh_lib.empty_concrete_mesh)
    token = _meant.set(None if mesh is None or whole is None else (whole, mesh))
    try:
        yield
    finally:
        _meant.reset(token)
        _contexts.device_context.set_local(devices_before)
        _contexts.abstract_mesh_context_manager.set_local(abstract_before)


def _meant_mesh(mesh: Any) -> Any:
    meant = _meant.get()
    if meant is None or not isinstance(mesh, Mesh | AbstractMesh):
        return mesh
    whole, rank = meant
    same_axes = set(mesh.axis_names) <= set(whole.axis_names)
    return rank if same_axes and mesh.abstract_mesh != rank.abstract_mesh else mesh


def _meant_sharding(sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = _meant_mesh(sharding.mesh)
    return sharding if mesh is sharding.mesh else sharding.update(mesh=mesh)


def _replace_argument(
    module: Any, name: str, position: int, replace: Callable[[Any], Any]
) -> None:
    """Makes `module.name` replace the argument at `position` before it does its work."""
    function = getattr(module, name)

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if _meant.get() is None:
            return function(*args, **kwargs)
        args = (*args[:position], replace(args[position]), *args[position + 1 :])
        return function(*args, **kwargs)

    setattr(module, name, replaced)


# JAX 0.10.2, 0.11.2: where shard_map, with_sharding_constraint and jit, and reshard look at
# what they were given.
_replace_argument(shard_map_internals, "_shmap_checks", 0, _meant_mesh)
_replace_argument(pjit, "_create_sharding_for_array", 1, _meant_sharding)
_replace_argument(pjit, "canonicalize_sharding", 0, _meant_sharding)


# JAX 0.10.2, 0.11.2: xla_client.make_cpu_client and its num_devices.
@functools.cache
def planning_devices(count: int) -> list[Any]:
    """CPU devices beside those that JAX uses: to trace and lower for, not to run on."""
    return list(xla_client.make_cpu_client(num_devices=count).devices())


# --- JAX's settings ---------------------------------------------------------------------


# JAX 0.10.2, 0.11.2: config.trace_context, config.default_prng_impl, and `context_mesh`'s
# states.
def settings_key() -> Any:
    """Equal while JAX would trace and lower a function to the same program.

    What `jax.jit` keys on, without the mesh that is around the call: a step brings its own.
    """
    mesh = config.mesh_context_manager.swap_local(())
    no_mesh = mesh_lib.empty_abstract_mesh
    abstract_mesh = _contexts.abstract_mesh_context_manager.swap_local(no_mesh)
    try:
        return config.trace_context(), config.default_prng_impl.value
    finally:
        config.mesh_context_manager.set_local(mesh)
        _contexts.abstract_mesh_context_manager.set_local(abstract_mesh)


# JAX 0.10.2, 0.11.2: core.trace_state_clean.
def is_tracing() -> bool:
    """Whether the code that runs is being traced, differentiated or vmapped."""
    return not jax_core.trace_state_clean()


# JAX 0.10.2, 0.11.2: the `_trace` of a tracer and its is_valid.
def is_of_a_closed_trace(value: Any) -> bool:
    """Whether JAX traced the value in a trace that it is done with, and refuses its use."""
    return isinstance(value, jax_core.Tracer) and not value._trace.is_valid()


# --- Lines of the user's code -----------------------------------------------------------


# JAX 0.10.2, 0.11.2: source_info_util.register_exclusion, which takes the beginning of paths.
def exclude_from_user_lines(folder: str) -> None:
    """Files in this folder are not the user's."""
    source_info_util.register_exclusion(folder)


# JAX 0.10.2, 0.11.2: source_info_util.current_name_stack and user_context.
def at_line_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """What is traced inside stands on the line, and in the name stack, of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


# JAX 0.10.2, 0.11.2: source_info_util.is_user_filename.
def is_user_file(name: str) -> bool:
    return source_info_util.is_user_filename(name)


# JAX 0.10.2, 0.11.2: the traceback in an equation's source_info, source_info_util.user_frames.
def user_frames(eqn: JaxprEqn) -> list[Any]:
    """The user's own frames behind an equation, innermost first; equal if the same call."""
    return list(source_info_util.user_frames(eqn.source_info.traceback))


# JAX 0.10.2, 0.11.2: file_name and start_line of such a frame.
def line_of(frame: Any) -> str:
    """A frame as file:line."""
    return f"{frame.file_name}:{frame.start_line}" if frame != "?" else frame


def _innermost_user_line(traceback: Any) -> str | None:
    frame = source_info_util.user_frame(traceback)
    return line_of(frame) if frame else None


def user_line(eqn: JaxprEqn) -> str | None:
    """The user's own line behind an equation, as file:line."""
    return _innermost_user_line(eqn.source_info.traceback)


# JAX 0.10.2, 0.11.2: source_info_util.current, user_frame.
def current_line() -> str | None:
    """The user's own line that is running, as file:line."""
    if line := _innermost_user_line(source_info_util.current().traceback):
        return line
    # JAX's traceback begins where it began to trace.
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else None


# --- What JAX's own messages call a function --------------------------------------------


# JAX 0.10.2, 0.11.2: api_util.debug_info and save_wrapped_fun_debug_info.
def name_after(
    run: Callable[..., Any],
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> None:
    """Makes JAX, where it traces `run`, speak of `fun` and of its arguments."""
    names = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    info = api_util.debug_info("jit", fun, args, kwargs, **names)
    api_util.save_wrapped_fun_debug_info(run, info)


# --- Pytrees ----------------------------------------------------------------------------


# JAX 0.10.2, 0.11.2: PyTreeDef.node_data and children.
def node_of_tree(tree: Any) -> tuple[Any, list[Any]]:
    """The root of a treedef, (its type, its data) or None for a leaf, and its children."""
    return tree.node_data(), tree.children()


# JAX 0.10.2, 0.11.2: PyTreeDef.from_node_data_and_children.
def tree_of_node(node: tuple[type, Any], children: Sequence[Any]) -> Any:
    """The other way; ValueError for a type that is no registered pytree."""
    try:
        return jax.tree_util.PyTreeDef.from_node_data_and_children(
            jax.tree_util.default_registry, node, children
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from None


# JAX 0.10.2, 0.11.2: the name in a key dtype's _impl.
def key_implementation(dtype: Any) -> str | None:
    """What PRNG keys of the dtype are made by; None for other dtypes."""
    return dtype._impl.name if jnp.issubdtype(dtype, jax.dtypes.prng_key) else None


# --- XLA's client -----------------------------------------------------------------------


# JAX 0.10.2: distributed.global_state, its client's key-value store and barriers.
def in_a_job() -> bool:
    """Whether jax.distributed.initialize() was called."""
    return distributed.global_state.client is not None


# JAX 0.10.2: api.clean_up() shuts the client down at exit, which waits for all processes;
# so does the client's destructor.
def leave_job_at_once() -> None:
    """Forgets the coordination service, so that this process ends without the others."""
    state = distributed.global_state
    for kept in (state.client, state.service):
        if kept is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.client = state.service = None


def coordination() -> Any:
    """The client of the job's coordination service."""
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed.initialize() was not called")
    return client


def coordination_process() -> int:
    """This process' number there, which jax.process_index() asks the devices for."""
    return int(distributed.global_state.process_id)


def coordination_address() -> str:
    """HOST:PORT of that service."""
    return str(distributed.global_state.coordinator_address)


# JAX 0.10.2: clusters.ClusterEnv, whose subclasses jax.distributed.initialize() asks.
class _Launched(clusters.ClusterEnv):  # type: ignore[misc]
    """A process of `jaxpp launch`; JAX itself reads the JAX_COORDINATOR_ADDRESS set there."""

    name = "jaxpp"

    @classmethod
    def is_env_present(cls) -> bool:
        return _core.option("JPP_PROCESS_ID") is not None

    @classmethod
    def get_process_count(cls) -> int:
        return int(_core.option("JPP_NUM_PROCESSES") or 1)

    @classmethod
    def get_process_id(cls) -> int:
        return int(_core.option("JPP_PROCESS_ID") or 0)

    @classmethod
    def get_local_process_id(cls) -> int | None:
        return cls.get_process_id()


# JAX 0.10.2, 0.11.2: jaxlib's _profiler.register_plugin_profiler.
def add_to_profiles(plugin: Any) -> None:
    """Has JAX ask a plugin's profiler as well, from the next profile on."""
    _profiler.register_plugin_profiler(plugin)


# JAX 0.10.2, 0.11.2: jax._src.xla_bridge.
def backends_are_made() -> bool:
    """Whether JAX has made its clients, which read the environment then."""
    return xla_bridge.backends_are_initialized()


# JAX 0.10.2, 0.11.2: jaxlib's xla_client.generate_pjrt_gpu_plugin_options.
def gpu_client_options() -> dict[str, Any]:
    """What JAX makes its client of GPUs with, as XLA_PYTHON_CLIENT_* say."""
    return xla_client.generate_pjrt_gpu_plugin_options()


# JAX 0.10.2, 0.11.2: jaxlib's xla_client.custom_call_targets.
def host_call_targets() -> dict[str, Any]:
    """All custom-call handlers that this process has registered for the CPU, by name."""
    return xla_client.custom_call_targets("Host")


# JAX 0.10.2, 0.11.2: xla_client.CompileOptions with its executable_build_options.
def serialized_compile_options(
    devices: int, user_options: dict[str, Any] | None, *, spans_processes: bool = False
) -> bytes:
    """A CompileOptionsProto for one SPMD program on so many devices; which ones, the request
    to compile it says. One: a program for any one device."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    overrides = dict(user_options or {})
    if devices > 1 and jax.__version_info__ >= (0, 11):
        # On there; a module in portable form is then refused its use, with a line in the
        # plugin's log for each task.
        overrides.setdefault("xla_enable_hlo_sharding_v3", False)
    if spans_processes:
        # Else the processes share the search for the fastest kernels, and tasks with the same
        # code on other ranks may get into each other's way in the store.
        overrides.setdefault("xla_gpu_shard_autotuning", False)
    options.env_option_overrides = list(overrides.items())
    if devices == 1:
        options.compile_portable_executable = True
        return options.SerializeAsString()
    options.num_partitions = build.num_partitions = devices
    options.num_replicas = build.num_replicas = 1
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    return options.SerializeAsString()


# --- Modules ----------------------------------------------------------------------------

_DIMENSION = re.compile(r"\{([^}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')


# JAX 0.10.2, 0.11.2: how MLIR prints Shardy's attributes.
def _parse_sharding(text: str) -> list[tuple[str, ...]]:
    """`#sdy.sharding<@mesh, [{"data"}, {?}]>` as mesh axes by dimension."""
    inside = text[text.index("[") : text.index("]") + 1]
    dimensions = []
    for part in _DIMENSION.findall(inside):
        axes = _AXIS.findall(part)
        # A part of an axis can not be said in a PartitionSpec.
        dimensions.append(() if any(sub for _, sub in axes) else tuple(a for a, _ in axes))
    return dimensions


def _spec_of(attribute: Any, aval: Any, mesh: Mesh) -> PartitionSpec:
    """The spec in a module's attribute; dimensions that it does not divide stay whole."""
    if attribute is None or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return PartitionSpec()
    parts: list[Any] = []
    for size, axes in zip(aval.shape, _parse_sharding(str(attribute)), strict=True):
        ways = math.prod(mesh.shape[a] for a in axes)
        keep = axes and ways > 1 and size % ways == 0
        parts.append((axes[0] if len(axes) == 1 else axes) if keep else None)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


# JAX 0.10.2, 0.11.2: the name of the operation and of its attribute.
def _custom_calls(op: Any, targets: Sequence[str]) -> Iterator[Any]:
    """Custom calls of `targets`; MLIR's own walk makes a RuntimeError of a Ctrl-C in it."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if (
                    inner.operation.name == "stablehlo.custom_call"
                    and inner.attributes["call_target_name"].value in targets
                ):
                    yield inner
                yield from _custom_calls(inner, targets)


# JAX 0.10.2, 0.11.2: jaxlib's stablehlo.
def _portable_version() -> str:
    """Of StableHLO, as plugins read it that are twelve weeks old."""
    twelve_weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_12
    version: str = stablehlo.get_version_from_compatibility_requirement(twelve_weeks)
    return version


# JAX 0.10.2, 0.11.2: a lowered function's compiler_ir and `_lowering`; the rest beside each
# method.
class LoweredModule:
    """A function of JAX lowered to a StableHLO module, which may still be changed."""

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self._module = lowered.compiler_ir("stablehlo")
        # Those that JAX would put into its own client's table.
        self.callback_functions: Sequence[Callable[..., Any]] = lowered._lowering.compile_args[
            "host_callbacks"
        ]

    def _main(self) -> Any:
        for function in self._module.body.operations:
            attributes = function.attributes
            if "sym_name" in attributes and attributes["sym_name"].value == "main":
                return function
        raise AssertionError("a module without main")

    # JAX 0.10.2, 0.11.2: tf.aliasing_output, as JAX itself writes it.
    def set_aliases(self, donations: Sequence[int | None]) -> None:
        """Tells XLA which argument's memory each output takes over; an entry an argument."""
        if all(d is None for d in donations):
            return
        with self._module.context:
            main = self._main()
            i32 = ir.IntegerType.get_signless(32)
            rows = []
            for row, output in zip(main.arg_attrs, donations, strict=True):
                attributes = {named.name: named.attr for named in row}
                if output is not None:
                    attributes["tf.aliasing_output"] = ir.IntegerAttr.get(i32, output)
                rows.append(ir.DictAttr.get(attributes))
            main.arg_attrs = ir.ArrayAttr.get(rows)

    # JAX 0.10.2, 0.11.2: jaxlib's pass manager with Shardy's pipeline; sdy.sharding.
    def propagated_specs(
        self, arguments: Sequence[Any], results: Sequence[Any], mesh: Mesh
    ) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """What Shardy finds for arguments and results, whose abstract values are given."""
        with self._module.context:
            name = "builtin.module(sdy-propagation-pipeline)"
            passmanager.PassManager.parse(name).run(self._module.operation)
            main = self._main()

            def specs(rows: Any, avals: Sequence[Any]) -> list[PartitionSpec]:
                found = [row["sdy.sharding"] if "sdy.sharding" in row else None for row in rows]
                return [_spec_of(a, v, mesh) for a, v in zip(found, avals, strict=True)]

            return (
                specs(main.arg_attrs, arguments),
                specs(main.attributes["res_attrs"], results),
            )

    # JAX 0.10.2, 0.11.2: mhlo.backend_config's index into the table of callbacks.
    def redirect_callbacks(
        self,
        targets: Sequence[str],
        target: str,
        attribute: str,
        make: Callable[[Callable[..., Any], Any, Any], tuple[Any, int]],
    ) -> list[Any]:
        """Makes each call of JAX's `targets` one of `target`, another handler.

        `make` takes the Python function and the types of operands and results, each (name of
        the element type in MLIR, shape), and gives an object and its address; the address
        becomes the call's only attribute, under the name `attribute`.
        """
        made = []
        with self._module.context:
            for op in list(_custom_calls(self._module.operation, targets)):
                index = ir.IntegerAttr(op.attributes["mhlo.backend_config"]["index"]).value
                types = [
                    [ir.RankedTensorType(v.type) for v in values]
                    for values in (op.operands, op.results)
                ]
                named = [[(str(t.element_type), tuple(t.shape)) for t in ts] for ts in types]
                callback, address = make(self.callback_functions[index], *named)
                u64 = ir.IntegerType.get_unsigned(64)
                named_address = {attribute: ir.IntegerAttr.get(u64, address)}
                op.attributes["mhlo.backend_config"] = ir.DictAttr.get(named_address)
                op.attributes["call_target_name"] = ir.StringAttr.get(target)
                made.append(callback)
        return made

    # JAX 0.10.2, 0.11.2: an operation's clone.
    def printer(self) -> Callable[[], str]:
        """Prints the module as it is now."""
        copy = self._module.operation.clone()
        return lambda: str(copy)

    # JAX 0.10.2, 0.11.2: interpreters.mlir.module_to_bytecode; serialize_portable_artifact of
    # jaxlib's stablehlo and of its XLA.
    def into_bytecode(self) -> bytes:
        """A form that plugins of other versions of XLA read; the module is used up."""
        version = _portable_version()
        code = mlir.module_to_bytecode(self._module)
        # Bytecode names the dialects it uses. XLA's own serializer takes these to StableHLO,
        # but parses the module anew: ten times the time.
        if any(dialect in code for dialect in (b"chlo\0", b"mhlo\0", b"sdy\0")):
            return xla_client._xla.mlir.serialize_portable_artifact(code, version)
        return stablehlo.serialize_portable_artifact(self._module, version)


# JAX 0.10.2, 0.11.2: interpreters.mlir.make_ir_context and module_to_bytecode; jaxlib's
# stablehlo.
def replace_addresses(
    code: bytes, target: str, attribute: str, addresses: Mapping[int, int]
) -> bytes:
    """Code of `into_bytecode` whose calls of `target` hold other addresses in `attribute`."""
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, code)
        for op in list(_custom_calls(module.operation, (target,))):
            found = ir.IntegerAttr(op.attributes["mhlo.backend_config"][attribute])
            renewed = ir.IntegerAttr.get(found.type, addresses[found.value])
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get({attribute: renewed})
        return stablehlo.serialize_portable_artifact(module, _portable_version())


# JAX 0.10.2, 0.11.2: interpreters.mlir.make_ir_context and dtype_to_ir_type.
def element_type_name(dtype: Any) -> str:
    """The name of a dtype's element type in MLIR."""
    with mlir.make_ir_context():
        return str(mlir.dtype_to_ir_type(np.dtype(dtype)))

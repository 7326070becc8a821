"""`mpmd_jit_with_loop`: from a step function to a pipeline that runs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _core
from jaxpp.array import MpmdArray
from jaxpp.client.devices import begin_devices, devices_for
from jaxpp.errors import (
    make_error,
    shorten,
)
from jaxpp.garbage import rare_collections
from jaxpp.jax_internals.context import is_tracing, settings_key
from jaxpp.mesh import MpmdMesh
from jaxpp.plan.costs import CostSummary
from jaxpp.plan.given import given_memories
from jaxpp.plan.planned import Traced
from jaxpp.plan.planning import trace_step
from jaxpp.plan.traced_call import name_of, trace_function
from jaxpp.progress import reporting
from jaxpp.run.compiled import CompiledStep
from jaxpp.trace.call import (
    Call,
    Options,
    Signature,
    TracedArgument,
    compiler_options_of,
    flag_of,
    fsdp_of,
    limits_by_memory,
    memory_limits_of,
    plugin_of,
    static_key,
    steps_in_flight_of,
    struct_key,
)
from jaxpp.trace.nested import bind_step

__all__ = ["LoweredStep", "MpmdFunction", "TracedStep", "mpmd_jit_with_loop"]


_log = logging.getLogger("jaxpp")


class MpmdFunction:
    """The callable that `mpmd_jit_with_loop` returns. It compiles on the first call.

    It is used like a function of `jax.jit`: it can be called, traced and lowered, and it can
    decorate a function or a method. Under `jax.disable_jit()` the function runs op by op, one
    microbatch after the other.
    """

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        self._fun = fun
        self._options = options
        self._signature = Signature(fun, options)
        self._compiled: dict[Any, CompiledStep] = {}
        self._given_memories: dict[Any, list[str | None]] = {}  # keyed by the tree of a call
        functools.update_wrapper(self, fun, updated=())

    def _key(self, call: Call) -> Any:
        try:
            leaves = tuple(struct_key(leaf) for leaf in call.leaves)
            if self._options.in_specs is not None and any(len(leaf) > 3 for leaf in leaves):
                leaves = self._without_given_memories(call, leaves)
            key = (settings_key(), static_key(call.static), call.tree, leaves)
            hash(key)
        except (TypeError, OverflowError):
            self._signature.check(call)
            raise
        except TracedArgument:
            self._refuse_leaked(call)
            raise
        return key

    def _without_given_memories(self, call: Call, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """The types of the leaves, without the memories of those that in_shardings place
        in one."""
        given = self._given_memories.get(call.tree)
        if given is None:
            names, _ = self._signature.describe(call)
            given = given_memories(self._options, call.args, names)
            given += [None] * (len(leaves) - len(given))  # keyword arguments
            self._given_memories[call.tree] = given
        pairs = zip(leaves, given, strict=True)
        return tuple(leaf[:3] if memory else leaf for leaf, memory in pairs)

    def _refuse_leaked(self, call: Call) -> None:
        if not is_tracing():
            name, leaf = self._signature.traced(call) or ("?", None)
            raise make_error(
                "invalid-argument",
                f"argument {name}: expected an array, found {shorten(leaf)}, a tracer that "
                "leaked from a function that JAX traced earlier; return the value from that "
                "function",
            )

    def _bind(self, call: Call) -> Any:
        """Traces the call as one equation."""
        closed, out_tree = trace_function(self._fun, self._signature, call, self._options)
        return out_tree.unflatten(bind_step(name_of(self._fun), closed, call.leaves))

    def _compile(self, call: Call, traced: Traced | None = None) -> CompiledStep:
        _core.check_process()
        if self._compiled:
            _log.debug(
                "%s: new shapes, dtypes, statics or settings of JAX: tracing again", self._fun
            )
        devices = begin_devices(self._options.mesh, self._options.plugin)
        with rare_collections():
            traced = traced or self._trace(call)
            return CompiledStep(traced, devices(), self._options)

    def _trace(self, call: Call) -> Traced:
        def measure(trial: Traced) -> list[Any]:
            devices = devices_for(self._options.mesh, self._options.plugin)
            return CompiledStep(trial, devices, self._options).measure(call.leaves)

        return trace_step(self._fun, self._signature, call, self._options, measure)

    def _get(self, call: Call, traced: Traced | None = None) -> CompiledStep:
        """The compiled step; `traced` is its plan, if there is one already."""
        key = self._key(call)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(call, traced)
        return compiled

    def trace_and_place(self, *args: Any, **kwargs: Any) -> Traced:
        """The plan for these arguments (arrays or ShapeDtypeStructs), without compiling it.

        If a loop uses `Auto`, its stages are measured first.
        """
        return self._plan(self._concrete(args, kwargs))

    def _plan(self, call: Call) -> Traced:
        self._key(call)  # refuses invalid arguments
        return self._trace(call)

    def trace(self, *args: Any, **kwargs: Any) -> TracedStep:
        """The step's jaxpr for these arguments, like `jax.jit(...).trace`."""
        call = self._concrete(args, kwargs)
        self._key(call)
        closed, out_tree = trace_function(self._fun, self._signature, call, self._options)
        return TracedStep(self, call, closed, out_tree)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredStep:
        """The step planned for these arguments but not compiled, like `jax.jit(...).lower`."""
        call = self._concrete(args, kwargs)
        return LoweredStep(self, call, self._plan(call))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the results for these arguments, without planning."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Drops the compiled steps. Arrays that steps have returned remain valid."""
        self._compiled.clear()

    def compile(self, *args: Any, **kwargs: Any) -> BoundStep:
        """Compiles the step for these arguments (arrays or ShapeDtypeStructs)."""
        return BoundStep(self, self._get(self._concrete(args, kwargs)))

    def prepare(self, *args: Any, **kwargs: Any) -> BoundStep:
        """Does before the first batch exists what the first call would do: plans and compiles
        the step for these arguments (arrays or ShapeDtypeStructs), connects its processes and
        runs it once on zeros, so that memory is allocated and code is loaded.

        Every process of a job calls it, like a step. The results are dropped, and checks for
        NaNs are off. Messages and traces count this run as step 1. A step that calls back into
        Python (`jax.debug.print`) is not run. A line on the terminal shows what it is doing. If
        the logger "jaxpp" is enabled for INFO, it reports each phase instead.
        """
        call = self._concrete(args, kwargs)
        with reporting(f"step {name_of(self._fun)}") as begin:
            begin("planning and compiling")
            compiled = self._get(call)
            begin("running once on zeros")
            compiled.warm_up()
        return BoundStep(self, compiled)

    def _concrete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = self._signature.split(args, kwargs)
        if traced := self._signature.traced(call):
            raise make_error(
                "invalid-argument",
                f"step {name_of(self._fun)}: argument {traced[0]}: expected an array or a "
                f"jax.ShapeDtypeStruct to compile for, found {shorten(traced[1])}, a value "
                "that JAX traces",
            )
        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:
            return self._run_eagerly(args, kwargs)
        call = self._signature.split(args, kwargs)
        try:
            compiled = self._get(call)
        except TracedArgument:
            return self._bind(call)
        return compiled.run_leaves(call.leaves)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function without a pipeline, on JAX's default devices."""

        def on_host(leaf: Any) -> Any:
            return jnp.asarray(np.asarray(leaf)) if isinstance(leaf, MpmdArray) else leaf

        args, kwargs = jax.tree.map(on_host, (args, kwargs))
        with self._options.mesh.eager_context():
            return self._fun(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MpmdMethod(self, owner)


class MpmdMethod:
    """A step that decorates a method, bound to an object. The object is the first argument:
    static if `static_argnums` or `static_argnames` includes it, otherwise a pytree."""

    def __init__(self, function: MpmdFunction, owner: Any) -> None:
        self.__func__ = function
        self.__self__ = owner
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def trace_and_place(self, *args: Any, **kwargs: Any) -> Traced:
        """Like `MpmdFunction.trace_and_place`."""
        return self.__func__.trace_and_place(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> TracedStep:
        """Like `MpmdFunction.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredStep:
        """Like `MpmdFunction.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Like `MpmdFunction.eval_shape`."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Like `MpmdFunction.compile`; the result is called like the method."""
        step = self.__func__.compile(self.__self__, *args, **kwargs)
        return BoundStep(self, step.compiled)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Like `MpmdFunction.prepare`; the result is called like the method."""
        step = self.__func__.prepare(self.__self__, *args, **kwargs)
        return BoundStep(self, step.compiled)

    def clear_cache(self) -> None:
        """Like `MpmdFunction.clear_cache`, for all objects of the class."""
        self.__func__.clear_cache()


class TracedStep:
    """A step traced for given arguments but not planned.

    Attributes:
      jaxpr: the function's jaxpr on flat arguments.
      out_info: the shapes and dtypes of the results.
      in_avals: the types of the flat arguments.
      fun_name: the function's name.
    """

    def __init__(self, function: MpmdFunction, call: Call, jaxpr: Any, out_tree: Any) -> None:
        self._function, self._call = function, call
        self.jaxpr = jaxpr
        structs = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
            for a in jaxpr.out_avals
        ]
        self.out_info = out_tree.unflatten(structs)
        self.in_avals = jaxpr.in_avals
        self.fun_name = name_of(function)

    def lower(self) -> LoweredStep:
        """Plans the step."""
        return LoweredStep(self._function, self._call, self._function._plan(self._call))


class LoweredStep:
    """A step planned for given arguments but not compiled.

    Attributes:
      plan: the plan that `trace_and_place` returns.
    """

    def __init__(self, function: MpmdFunction, call: Call, plan: Traced) -> None:
        self._function, self._call = function, call
        self.plan = plan

    def as_text(self) -> str:
        """The whole program: every task, transfer and deletion."""
        return self.plan.program_text

    @property
    def in_shardings(self) -> Any:
        """The `in_shardings` of the compiled step."""
        return self.plan.in_shardings

    @property
    def out_shardings(self) -> Any:
        """The `out_shardings` of the compiled step."""
        return self.plan.out_shardings

    def cost_summary(self) -> CostSummary:
        """The costs of the step, without collectives, which only compiled tasks show."""
        return self.plan.cost_summary()

    def explain(self) -> str:
        """A page on what the step does, without collectives."""
        return self.plan.explain()

    @property
    def out_info(self) -> Any:
        """The shapes, dtypes and shardings of the results."""
        return self.plan.out_info

    def compile(self, compiler_options: dict[str, Any] | None = None) -> BoundStep:
        """Compiles the step from this plan.

        Args:
          compiler_options: XLA's options for every task, in addition to the step's.

        Raises:
          JaxppError: as for the step's first call.
        """
        function = self._function
        if compiler_options:
            given = compiler_options_of(compiler_options, "compile")
            options = function._options
            both = {**options.compiler_options, **given}
            options = dataclasses.replace(options, compiler_options=both)
            function = type(function)(function._fun, options)
        return BoundStep(function, function._get(self._call, self.plan))


class BoundStep:
    """A compiled step. A call with other shapes, dtypes or memory kinds compiles again."""

    def __init__(self, function: MpmdFunction | MpmdMethod, compiled: CompiledStep) -> None:
        self._function = function
        self.compiled = compiled

    def as_text(self) -> str:
        """The whole program: every task, transfer and deletion."""
        return str(self.compiled.closed_jaxpr)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "compiled":  # copy.copy() asks before it is set
            raise AttributeError(name)
        return getattr(self.compiled, name)

    def __dir__(self) -> list[str]:
        """Includes the attributes of the compiled step, for completion."""
        return sorted({*super().__dir__(), *dir(self.compiled)})


def _one_of(who: str, way: str, specs: Any, shardings: Any) -> tuple[Any, str]:
    """What the user gave, and the name of the argument."""
    if specs is not None and shardings is not None:
        raise make_error(
            "invalid-argument",
            f"{who}: expected {way}_specs or {way}_shardings, found both",
        )
    if shardings is not None:
        return shardings, f"{way}_shardings"
    return specs, f"{way}_specs"


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int | str) else tuple(given)


def check_function(who: str, fun: Any, mpmd_mesh: Any) -> None:
    if not isinstance(mpmd_mesh, MpmdMesh):
        raise make_error(
            "mesh",
            f"{who}: mpmd_mesh={shorten(mpmd_mesh)}; expected an MpmdMesh",
            wrong_type=True,
        )
    if not callable(fun):
        raise make_error(
            "invalid-argument",
            f"{who}: fun={shorten(fun)}; expected a function",
            wrong_type=True,
        )


def make_options(
    who: str,
    fun: Callable[..., Any],
    mpmd_mesh: Any,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    compiler_options: Any = None,
    plugin: Any = None,
    memory_limit: Any = None,
    steps_in_flight: Any = None,
    reduce_once: Any = True,
    fsdp: Any = None,
    offload: Any = None,
    out_ranks: Any = None,
    schedule: Any = None,
) -> Options:
    """Checks the arguments of the API function `who`."""
    check_function(who, fun, mpmd_mesh)
    device_limit, host_limit = limits_by_memory(memory_limit, who)
    given_in, in_word = _one_of(who, "in", in_specs, in_shardings)
    given_out, out_word = _one_of(who, "out", out_specs, out_shardings)
    return Options(
        who,
        mpmd_mesh,
        given_in,
        given_out,
        _as_tuple(static_argnums),
        _as_tuple(static_argnames),
        _as_tuple(donate_argnums),
        _as_tuple(donate_argnames),
        compiler_options_of(compiler_options, who),
        plugin_of(plugin, who),
        memory_limits_of(device_limit, mpmd_mesh, who),
        steps_in_flight_of(steps_in_flight, who),
        flag_of(reduce_once, "reduce_once", who),
        fsdp_of(fsdp, who),
        memory_limits_of(host_limit, mpmd_mesh, who),
        None if offload is None else flag_of(offload, "offload", who),
        out_ranks,
        schedule,
        in_word,
        out_word,
    )


def mpmd_jit_with_loop(
    fun: Callable[..., Any] | None = None,
    mpmd_mesh: MpmdMesh | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    compiler_options: dict[str, Any] | None = None,
    plugin: str | os.PathLike[str] | None = None,
    memory_limit: int | Sequence[int] | Mapping[str, int | Sequence[int]] | None = None,
    steps_in_flight: int | None = None,
    reduce_once: bool = True,
    fsdp: str | Callable[[str, Any], str | None] | None = None,
    offload: bool | None = None,
    schedule: Any = None,
    use_pgle: bool = False,
) -> Any:
    """Pipelines a training step that contains a `treduce`, or a `jax.lax.scan` over
    microbatches.

    Args:
      fun: the step. Arguments and results are pytrees of arrays.
      mpmd_mesh: the ranks and their devices.
      in_shardings, out_shardings: pytree prefixes of `NamedSharding`s or `MpmdSharding`s, whose
        specs are used. A result stays on exactly the ranks of its `MpmdSharding`.
      in_specs, out_specs: in place of shardings, pytree prefixes of `PartitionSpec`s over the
        axes of a rank's mesh. If both are omitted or None, the shardings are inferred.
      static_argnums, static_argnames: hashable arguments that are compiled in.
      donate_argnums, donate_argnames: arguments whose memory the step may reuse; they must not
        be used again.
      compiler_options: XLA's options for every task.
      plugin: the path of a PJRT plugin, or "cuda" or "rocm" for the one installed for JAX;
        default: JPP_PLUGIN, then the plugin of the mesh's devices.
      memory_limit: the bytes that a step may use on each device: weights, gradients, optimizer
        state, activations, receive slots and everything else kept between tasks. A number
        limits the total of all ranks on the same devices; a list has one limit per rank. A plan
        that exceeds the limit is refused before anything is compiled. A dict has limits by
        memory kind, "device" and "pinned_host".
      steps_in_flight: how many steps may be in flight; default: JPP_STEPS_IN_FLIGHT, then 2. A
        call returns as soon as the runtime has taken its arguments, and waits only while that
        many steps are unfinished. With 0, a call returns when its step is done. It is 1 under a
        memory limit that cannot hold the arguments and results of several steps.
      reduce_once: whether results that the loop adds up, such as gradients, are summed over the
        devices of a rank only once, after the loop. Until then, each device keeps its part of
        the sum. False: in every microbatch.
      fsdp: when weights that are sharded over the devices of the batch are gathered: "step",
        once before the loop, and kept until its end; "use", in each task that uses them, or
        each iteration of a scan over layers, and freed after it; a function of a weight's
        name, such as "params['w']", and its `jax.ShapeDtypeStruct` that returns one of these
        or None; None: where XLA does. Under a memory limit that cannot hold them until the
        loop's end, "step" becomes "use".
      offload: whether activations wait in pinned host memory from the forward of a stage to its
        backward, except those of the last stage, whose backward comes next, and those of less
        than 4 KiB. None: on ranks whose memory limit cannot hold them.
      schedule: the pipeline schedule of a step that loops over its microbatches with
        `jax.lax.scan` instead of `treduce`. A carry of the scan must be a sum or a maximum over
        the microbatches, or must not depend on the stages.
      use_pgle: accepted for compatibility and ignored: no task is recompiled
        from a profile.

    Returns:
      The pipelined step, an `MpmdFunction`; a decorator for functions and methods if `fun` is
      omitted.

    Raises:
      JaxppError: from the first call or `compile`, before anything runs: "stage-marks",
        "schedule", "mesh", "microbatch", "operation", "sharding", "plugin", "devices",
        "donated", "unsupported", "invalid-argument", "out-of-memory" (the memory limit).
    """
    options = {k: v for k, v in locals().items() if k not in ("fun", "mpmd_mesh", "use_pgle")}
    if fun is None:
        return functools.partial(mpmd_jit_with_loop, mpmd_mesh=mpmd_mesh, **options)
    return MpmdFunction(fun, make_options("mpmd_jit_with_loop", fun, mpmd_mesh, **options))

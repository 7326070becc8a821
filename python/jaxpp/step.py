"""`mpmd_jit_with_loop`: from a step function to a pipeline that runs."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _core
from jaxpp.array import MpmdArray
from jaxpp.errors import (
    make_error,
    shorten,
)
from jaxpp.jax_internals.context import is_tracing, settings_key
from jaxpp.mesh import MpmdMesh
from jaxpp.plan.costs import CostSummary
from jaxpp.plan.planning import Traced, name_of, trace_function, trace_step
from jaxpp.run.compiled import CompiledStep
from jaxpp.run.devices import devices_for
from jaxpp.trace.call import (
    Call,
    Options,
    Signature,
    TracedArgument,
    compiler_options_of,
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
    """What `mpmd_jit_with_loop` makes of a function. Compiles at first use.

    It is used as a function of `jax.jit`: called, lowered, traced, as a decorator of a
    function or of a method. Under `jax.disable_jit()` its function runs as it is, and the
    microbatches of a loop one after the other.
    """

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        self._fun = fun
        self._options = options
        self._signature = Signature(fun, options)
        self._compiled: dict[Any, CompiledStep] = {}
        functools.update_wrapper(self, fun, updated=())

    def _key(self, call: Call) -> Any:
        try:
            leaves = tuple(struct_key(leaf) for leaf in call.leaves)
            key = (settings_key(), static_key(call.static), call.tree, leaves)
            hash(key)
        except (TypeError, OverflowError):
            self._signature.check(call)
            raise
        except TracedArgument:
            self._refuse_leaked(call)
            raise
        return key

    def _refuse_leaked(self, call: Call) -> None:
        if not is_tracing():
            name, leaf = self._signature.traced(call) or ("?", None)
            raise make_error(
                "invalid-argument",
                f"argument {name}: expected an array, found {shorten(leaf)}, a value from "
                "inside a function that JAX traced, which has ended; return it from there",
            )

    def _bind(self, call: Call) -> Any:
        """The call on traced values, as one equation."""
        closed, out_tree = trace_function(self._fun, self._signature, call, self._options.mesh)
        return out_tree.unflatten(bind_step(name_of(self._fun), closed, call.leaves))

    def _compile(self, call: Call, traced: Traced | None = None) -> CompiledStep:
        _core.check_process()
        if self._compiled:
            _log.debug(
                "%s: new shapes, dtypes, statics or settings of JAX: tracing again", self._fun
            )
        traced = traced or self._trace(call)
        devices = devices_for(self._options.mesh, self._options.plugin)
        return CompiledStep(traced, devices, self._options)

    def _trace(self, call: Call) -> Traced:
        def measure(trial: Traced) -> list[Any]:
            devices = devices_for(self._options.mesh, self._options.plugin)
            return CompiledStep(trial, devices, self._options).measure(call.leaves)

        return trace_step(self._fun, self._signature, call, self._options, measure)

    def _get(self, call: Call, traced: Traced | None = None) -> CompiledStep:
        """The compiled step; `traced` is its plan, if that is there."""
        key = self._key(call)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(call, traced)
        return compiled

    def trace_and_place(self, *args: Any, **kwargs: Any) -> Traced:
        """The plan for these arguments (arrays or ShapeDtypeStructs), not compiled.

        A loop under `Auto` is measured for it.
        """
        return self._plan(self._concrete(args, kwargs))

    def _plan(self, call: Call) -> Traced:
        self._key(call)  # refuses what can not be an argument
        return self._trace(call)

    def trace(self, *args: Any, **kwargs: Any) -> TracedStep:
        """The step's jaxpr for these arguments, as `jax.jit(...).trace` has it."""
        call = self._concrete(args, kwargs)
        self._key(call)
        closed, out_tree = trace_function(self._fun, self._signature, call, self._options.mesh)
        return TracedStep(self, call, closed, out_tree)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredStep:
        """The step planned for these arguments, to compile, as `jax.jit(...).lower` has it."""
        call = self._concrete(args, kwargs)
        return LoweredStep(self, call, self._plan(call))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the results for these arguments; nothing is planned."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets what was compiled. Arrays that steps have returned stay."""
        self._compiled.clear()

    def compile(self, *args: Any, **kwargs: Any) -> BoundStep:
        """The step compiled for these arguments (arrays or ShapeDtypeStructs)."""
        return BoundStep(self, self._get(self._concrete(args, kwargs)))

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
        """The function as it is, on arrays that lie where JAX puts them."""

        def on_host(leaf: Any) -> Any:
            return jnp.asarray(np.asarray(leaf)) if isinstance(leaf, MpmdArray) else leaf

        args, kwargs = jax.tree.map(on_host, (args, kwargs))
        with self._options.mesh.eager_context():
            return self._fun(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MpmdMethod(self, owner)


class MpmdMethod:
    """A step that was defined in a class, of one of its objects, which is its first argument:
    static, if `static_argnums` or `static_argnames` says so, or else a pytree."""

    def __init__(self, function: MpmdFunction, owner: Any) -> None:
        self.__func__ = function
        self.__self__ = owner
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def trace_and_place(self, *args: Any, **kwargs: Any) -> Traced:
        """As `MpmdFunction.trace_and_place`."""
        return self.__func__.trace_and_place(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> TracedStep:
        """As `MpmdFunction.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredStep:
        """As `MpmdFunction.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `MpmdFunction.eval_shape`."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """As `MpmdFunction.compile`; the result is called as the method is."""
        step = self.__func__.compile(self.__self__, *args, **kwargs)
        return BoundStep(self, step.compiled)

    def clear_cache(self) -> None:
        """As `MpmdFunction.clear_cache`, for all objects of the class."""
        self.__func__.clear_cache()


class TracedStep:
    """A step traced for some arguments, not planned.

    Attributes:
      jaxpr: its function's, on flat arguments.
      out_info: the shapes and dtypes of its results.
      in_avals: of its flat arguments.
      fun_name: what its function is called.
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
        """The step planned, to compile."""
        return LoweredStep(self._function, self._call, self._function._plan(self._call))


class LoweredStep:
    """A step planned for some arguments, not compiled.

    Attributes:
      plan: what `trace_and_place` gives.
    """

    def __init__(self, function: MpmdFunction, call: Call, plan: Traced) -> None:
        self._function, self._call = function, call
        self.plan = plan

    def as_text(self) -> str:
        """The whole program: every task, transfer and deletion."""
        return self.plan.program_text

    @property
    def in_shardings(self) -> Any:
        """As those of the compiled step."""
        return self.plan.in_shardings

    @property
    def out_shardings(self) -> Any:
        """As those of the compiled step."""
        return self.plan.out_shardings

    def cost_summary(self) -> CostSummary:
        """As that of the compiled step."""
        return self.plan.cost_summary()

    @property
    def out_info(self) -> Any:
        """The shapes and dtypes of the results, with their shardings."""
        return self.plan.out_info

    def compile(self) -> BoundStep:
        """The step compiled; what was planned is not planned again."""
        return BoundStep(self._function, self._function._get(self._call, self.plan))


class BoundStep:
    """A compiled step. Called with other shapes or dtypes it compiles again."""

    def __init__(self, function: MpmdFunction | MpmdMethod, compiled: CompiledStep) -> None:
        self._function = function
        self.compiled = compiled

    def as_text(self) -> str:
        """The whole program: every task, transfer and deletion."""
        return str(self.compiled.closed_jaxpr)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def _one_of(who: str, way: str, specs: Any, shardings: Any) -> Any:
    if specs is not None and shardings is not None:
        raise make_error(
            "invalid-argument",
            f"{who}: expected {way}_specs or {way}_shardings, found both",
        )
    return shardings if specs is None else specs


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


def make_function(
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
) -> MpmdFunction:
    """What `who`, a function of the API, makes of its arguments, which it has not checked."""
    check_function(who, fun, mpmd_mesh)
    options = Options(
        who,
        mpmd_mesh,
        _one_of(who, "in", in_specs, in_shardings),
        _one_of(who, "out", out_specs, out_shardings),
        _as_tuple(static_argnums),
        _as_tuple(static_argnames),
        _as_tuple(donate_argnums),
        _as_tuple(donate_argnames),
        compiler_options_of(compiler_options, who),
        plugin_of(plugin, who),
        memory_limits_of(memory_limit, mpmd_mesh, who),
        steps_in_flight_of(steps_in_flight, who),
    )
    return MpmdFunction(fun, options)


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
    memory_limit: int | Sequence[int] | None = None,
    steps_in_flight: int | None = None,
    use_pgle: bool = False,
) -> Any:
    """Makes a pipeline of a training step that has a `treduce` in it.

    Args:
      fun: the step. Arguments and results are pytrees of arrays.
      mpmd_mesh: its ranks and their devices.
      in_shardings, out_shardings: pytree prefixes of `NamedSharding`s or `MpmdSharding`s, of
        which the specs count; a result is left on the ranks of its `MpmdSharding`, and no
        others; or
      in_specs, out_specs: pytree prefixes of `PartitionSpec`s over the axes of a rank's
        mesh. Left out or None: inferred.
      static_argnums, static_argnames: arguments that are compiled in; hashable.
      donate_argnums, donate_argnames: arguments whose memory the step may reuse; they must
        not be used again.
      compiler_options: XLA's, for every task.
      plugin: the path of a PJRT plugin, or "cuda" or "rocm" for the one that is installed
        for JAX; default: JPP_PLUGIN, then that of the mesh's devices.
      memory_limit: bytes that a step may take on each device: weights, gradients, optimizer
        state, activations, receive slots and the rest of what it keeps between tasks; a
        number, within which is what all ranks on the same devices take, or one for each
        rank. A plan that takes more is refused before anything is compiled.
      steps_in_flight: how many steps may be under way at once; default: JPP_STEPS_IN_FLIGHT,
        then 2. A call returns when its arguments are taken, and waits only while so many
        steps are not done. 0: a call returns when its step is done. Under a memory limit
        that has no room for the arguments and results of several steps it is 1.
      use_pgle: accepted for scripts that say it, without effect: no task is compiled again
        from a profile.

    Returns:
      The pipelined step, an `MpmdFunction`; a decorator, also of methods, if `fun` is left
      out.

    Raises:
      JaxppError: from the first call or `compile`, before anything runs: "stage-marks",
        "schedule", "mesh", "microbatch", "operation", "sharding", "plugin", "devices",
        "donated", "unsupported", "invalid-argument", "out-of-memory" (the memory limit).
    """
    options = {k: v for k, v in locals().items() if k not in ("fun", "mpmd_mesh", "use_pgle")}
    if fun is None:
        return functools.partial(mpmd_jit_with_loop, mpmd_mesh=mpmd_mesh, **options)
    return make_function("mpmd_jit_with_loop", fun, mpmd_mesh, **options)

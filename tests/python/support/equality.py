"""Trains a model twice, as a pipeline and as plain JAX, and compares everything.

The plain side is a `lax.scan` over the same microbatches that adds up gradients. It uses
nothing from this package.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpp.api as jaxpp
from jaxpp.lower.lowering import TaskModules, modules_of_all
from jaxpp.placements import physical_array


def _axes_asked_for(ranks: int) -> dict[str, int]:
    """The axes in TEST_AXES, such as data=2,model=2, if there are enough devices. They apply to
    meshes for which a test gives no axes."""
    asked = os.environ.get("TEST_AXES", "")
    axes = {name: int(n) for name, n in (a.split("=") for a in asked.split(",") if a)}
    return axes if ranks * int(np.prod([*axes.values()])) <= len(jax.devices()) else {}


def some_devices(count: int) -> list[jax.Device]:
    """The first `count` devices; skips the test if there are fewer."""
    if count > len(jax.devices()):
        pytest.skip(f"needs {count} devices, found {len(jax.devices())}")
    return jax.devices()[:count]


def make_mesh(ranks: int, **axes: int) -> jaxpp.MpmdMesh:
    return mesh_of(ranks, axes or _axes_asked_for(ranks))


def mesh_of(ranks: int, axes: dict[str, int], sharing: int | None = None) -> jaxpp.MpmdMesh:
    """A mesh whose ranks have these axes, whatever TEST_AXES says. With TEST_SHARING=2, each
    two consecutive ranks share their devices."""
    sharing = sharing or int(os.environ.get("TEST_SHARING", "1"))
    shape = (-(-ranks // sharing), *axes.values())
    groups = np.array(some_devices(int(np.prod(shape)))).reshape(shape)
    devices = np.repeat(groups, sharing, axis=0)[:ranks]
    return jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stage", *axes)), "stage")


# Disables LLVM's optimisation, which takes half of a training test's time and changes results
# only within the tolerances. Tests that compare bits of different programs do not use this.
COMPILE_FASTER = {"xla_backend_optimization_level": 0}


@functools.cache
def _compile_plain_faster() -> dict[str, Any]:
    """COMPILE_FASTER for plain JAX, whose XLA compiles kernels faster without MLIR. JAX 0.11
    lacks that option, and so does the plugin."""
    options = {**COMPILE_FASTER, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return COMPILE_FASTER
    return options


def compiler_options() -> dict[str, Any] | None:
    """COMPILE_FASTER in `make test`, None in `make soak`, which sets one of these variables,
    and on accelerators."""
    soak = {"TEST_AXES", "TEST_SHARING"} & os.environ.keys()
    return None if soak or jax.default_backend() != "cpu" else COMPILE_FASTER


def no_mark(x: Any) -> Any:
    return x


@dataclasses.dataclass
class Problem:
    """A model to train: `loss(params, microbatch, i, mark)` returns (loss, aux or ())."""

    loss: Callable[..., Any]
    params: Any
    batch: Any  # arrays with microbatches along axis 0
    optimizer: Any = dataclasses.field(default_factory=lambda: optax.adamw(1e-2))
    aux_operation: Any = ()


def _length(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _apply(problem: Problem, params: Any, opt_state: Any, grads: Any) -> Any:
    updates, opt_state = problem.optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def pipelined_step(problem: Problem, schedule: Any) -> Callable[..., Any]:
    def step(params, opt_state, batch):
        def one(i):
            mb = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), batch
            )
            fun = jax.value_and_grad(problem.loss, has_aux=True)
            (loss, aux), grads = fun(params, mb, i, jaxpp.mark_stage_end)
            return loss, grads, aux

        operation = (jaxpp.Add, jaxpp.Add, problem.aux_operation)
        loss, grads, aux = jaxpp.treduce_i(one, _length(batch), schedule, operation)
        params, opt_state = _apply(problem, params, opt_state, grads)
        return params, opt_state, loss, aux

    return step


def plain_step(problem: Problem, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The step in plain JAX, compiled like a pipelined one with these compiler options."""

    def step(params, opt_state, batch):
        def one(carry, item):
            mb, i = item
            fun = jax.value_and_grad(problem.loss, has_aux=True)
            (loss, aux), grads = fun(params, mb, i, no_mark)
            return jax.tree.map(jnp.add, carry, (loss, grads)), aux

        zeros = jax.tree.map(jnp.zeros_like, params)
        index = jnp.arange(_length(batch), dtype=jnp.int32)
        (loss, grads), aux = jax.lax.scan(one, (jnp.float32(0), zeros), (batch, index))
        params, opt_state = _apply(problem, params, opt_state, grads)
        return params, opt_state, loss, aux

    if options is not None and COMPILE_FASTER.items() <= options.items():
        options = {**options, **_compile_plain_faster()}
    return jax.jit(step, compiler_options=options)


def modules_of(compiled: Any) -> TaskModules:
    """The modules of a compiled step's tasks."""
    return modules_of_all(compiled._traced.plan, compiled._make_code())


SUMS = ("all-reduce", "reduce-scatter")


def module_of_each(compiled: Any) -> dict[str, int]:
    """The index of each task's module, by the task's name."""
    tasks, of_task = compiled._traced.staged.tasks(), modules_of(compiled).of_task
    return {task.name: module for task, module in zip(tasks, of_task, strict=True)}


def peak_bytes(step: Any, problem: Problem) -> list[int]:
    """The planned peak of each rank, on each of its devices."""
    state = problem.optimizer.init(problem.params)
    lowered = step.lower(problem.params, state, problem.batch)
    return [rank.peak_bytes for rank in lowered.cost_summary().ranks]


def loop_tasks(collectives: Any, axis: str, *kinds: str) -> list[str]:
    """The loop's tasks that have collectives of these kinds over the axis."""
    return [
        c.task
        for c in collectives
        if axis in c.axes.split(",") and c.kind in kinds and "loop" not in c.task
    ]


def products(folder: pathlib.Path, task: str) -> int:
    """The number of products in a task's module, which JPP_DUMP wrote to the folder."""
    return (folder / f"{task}.mlir").read_text().count("stablehlo.dot_general")


def difference(ours: Any, plain: Any) -> float:
    """The largest difference of any leaf, relative to the leaf's largest element."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        a, b = (np.asarray(physical_array(x), np.float64) for x in (a, b))
        assert a.shape == b.shape
        if a.size:
            scale = max(np.abs(b).max(), 1e-6)
            worst = max(worst, float(np.abs(a - b).max() / scale))
    return worst


def assert_close(ours: Any, plain: Any, tolerance: float, what: str) -> None:
    found = difference(ours, plain)
    assert found < tolerance, f"{what} differ by {found:.2g}, expected {tolerance:.2g} at most"


def assert_equal(ours: Any, plain: Any, tolerance: float = 1e-5) -> None:
    """Asserts that two pytrees have equal structures and shapes, and elements within the
    tolerance."""
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert a.shape == np.shape(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=1e-7)


def assert_same_as_jax(step: Any, *args: Any, ranks: int = 2, **options: Any) -> Any:
    """Asserts that the step gives the same results as a pipeline and under plain jax.jit."""
    ours = jaxpp.mpmd_jit_with_loop(step, make_mesh(ranks), **options)
    copies = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)
    results = ours(*copies)  # copies, because the step may donate arguments
    assert_equal(results, jax.jit(step)(*args))
    return results


def _shards(array: Any) -> dict[str, set[bytes]]:
    """The contents of all shards of an array, grouped by the part that they hold."""
    found: dict[str, set[bytes]] = {}
    for local in array._partially_addressable_arrays.values():
        for shard in physical_array(local).addressable_shards:
            contents = np.asarray(shard.data).tobytes()
            found.setdefault(f"{local.shape} {shard.index}", set()).add(contents)
    return found


def assert_copies_equal(tree: Any, what: str) -> None:
    """Asserts that all copies of a part, on any ranks and devices, are bitwise equal."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # Ranks of other arrays hold different parts, not copies.
        if not isinstance(leaf, jaxpp.MpmdArray) or not leaf.is_mpmd_replicated:
            continue
        for part, copies in _shards(leaf).items():
            where = f"{what}{jax.tree_util.keystr(path)}, {part}"
            assert len(copies) == 1, f"{where}: copies differ, on ranks {leaf.mpmd_idxs}"


def _sharded(leaf: Any, *wanted: tuple[int, str], mesh: Any) -> PartitionSpec:
    """A spec for the first (dimension, axis) for which the mesh has the axis and its size
    divides the dimension."""
    sizes = mesh.lowering_mesh().shape
    for dim, axis in wanted:
        shape = np.shape(leaf)
        if axis in sizes and dim < len(shape) and shape[dim] % sizes[axis] == 0:
            return PartitionSpec(*[None] * dim, axis)
    return PartitionSpec()


def usual_specs(problem: Problem, mesh: Any) -> tuple[Any, None, Any]:
    """Typical specs: matrices, also stacked ones, are sharded over "model" or else "data", the
    batch over "data"; those of the optimizer's state are inferred."""

    def of_param(leaf: Any) -> PartitionSpec:
        last = np.ndim(leaf) - 1
        if last < 1:
            return PartitionSpec()
        return _sharded(leaf, (last, "model"), (last - 1, "data"), mesh=mesh)

    def of_batch(leaf: Any) -> PartitionSpec:
        return _sharded(leaf, (1, "data"), mesh=mesh)

    return jax.tree.map(of_param, problem.params), None, jax.tree.map(of_batch, problem.batch)


def _on_one_rank(tree: Any, specs: Any, mesh: Any) -> Any:
    def put(leaf: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh.lowering_mesh(), spec))

    return jax.tree.map(put, tree, specs)


def _sharding_on(mesh: Any, array: jax.Array) -> NamedSharding:
    own = array.sharding
    return own if isinstance(own, NamedSharding) else NamedSharding(mesh, PartitionSpec())


def assert_trains_equal(
    problem: Problem,
    schedule: Any,
    mesh: Any,
    steps: int = 3,
    tolerance: float = 1e-5,
    reduce_aux: Callable[[Any], Any] = lambda aux: aux,
    **options: Any,
) -> Any:
    """Trains as a pipeline and in plain JAX. Losses, parameters, optimizer state and aux must
    agree, on accelerators within ten times the tolerance, since they fuse plain JAX's loop.

    `reduce_aux` reduces the plain side's stacked aux as `aux_operation` does in the pipeline.
    Returns the pipelined step, compiled.
    """
    if jax.default_backend() != "cpu":
        tolerance *= 10
    params, batch = problem.params, problem.batch
    if "in_specs" not in options:
        # Shards plain JAX the same way on the devices of one rank, because sums over shards are
        # rounded differently than sums on one device.
        specs = usual_specs(problem, mesh)
        if mesh.lowering_mesh().size > 1:
            options = {"in_specs": specs, **options}
        params = _on_one_rank(problem.params, specs[0], mesh)
        batch = _on_one_rank(problem.batch, specs[2], mesh)
    options.setdefault("compiler_options", compiler_options())
    ours = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, schedule), mpmd_mesh=mesh, **options
    )
    plain = plain_step(problem, options["compiler_options"])
    on_one_rank = mesh.lowering_mesh()  # set for constraints that name its axes
    # Copies, because the pipeline may donate its arguments.
    state = (problem.params, problem.optimizer.init(problem.params))
    a = jax.tree.map(lambda leaf: leaf.copy(), state)
    with jax.set_mesh(on_one_rank):
        b = [params, problem.optimizer.init(params)]
    shardings = jax.tree.map(lambda leaf: _sharding_on(on_one_rank, leaf), b)
    for step in range(steps):
        *a, loss_a, aux_a = ours(*a, problem.batch)
        with jax.set_mesh(on_one_rank):
            # Otherwise JAX compiles the second step again, for other shardings.
            *b, loss_b, aux_b = plain(*jax.device_put(b, shardings), batch)
        assert_copies_equal((*a, loss_a, aux_a), f"step {step}: ")
        assert_close(loss_a, loss_b, tolerance, f"loss of step {step}")
        assert_close(aux_a, reduce_aux(aux_b), tolerance, f"aux of step {step}")
        assert_close(a[0], b[0], tolerance, f"parameters of step {step}")
    assert_close(a[1], b[1], 10 * tolerance, "optimizer state")
    return ours

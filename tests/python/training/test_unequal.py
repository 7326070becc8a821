"""Ranks with meshes of different sizes train as plain JAX does, with equal copies."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import assert_trains_equal, make_mesh, pipelined_step, usual_specs
from random_models import make_case, run_case, unequal_mesh

Shape = tuple[int, ...]


def mesh_of(*shapes: Shape, names: tuple[str, ...] = ("data",), **options: Any) -> Any:
    """Ranks with meshes of these shapes, on different devices."""
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    groups = np.split(np.array(jax.devices()), ends)
    pairs = zip(groups, shapes, strict=False)
    meshes = [Mesh(group.reshape(shape), names) for group, shape in pairs]
    return jaxpp.MpmdMesh(meshes, "stage", **options)


def problem_of(stages: int) -> Any:
    problem = models.mlp([1] * stages, 4)
    # Not Adam, which would magnify the rounding of sums over different devices.
    problem.optimizer = optax.sgd(0.1, momentum=0.9)
    return problem


def step_of(problem: Any, mesh: Any, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step with the usual specs, and its arguments."""
    specs = usual_specs(problem, mesh)
    schedule = jaxpp.Std1F1B(mesh.mpmd_dim)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, schedule), mesh, in_specs=specs, **options
    )
    return step, (problem.params, problem.optimizer.init(problem.params), problem.batch)


# --- Training -----------------------------------------------------------------------------

MESHES: dict[str, Callable[[], Any]] = {
    "1 and 4": lambda: mesh_of((1,), (4,)),
    "4 and 1": lambda: mesh_of((4,), (1,)),
    "1, 2 and 4": lambda: mesh_of((1,), (2,), (4,)),
    "as many, along other axes": lambda: mesh_of((4, 1), (1, 4), names=("data", "model")),
    "shared": lambda: mesh_of((1,), (2,), ranks_per_device=2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MESHES)
def test_trains_as_plain_jax_does(name: str) -> None:
    mesh = MESHES[name]()
    problem = problem_of(mesh.mpmd_dim)
    specs = usual_specs(problem, mesh)
    assert_trains_equal(problem, jaxpp.Std1F1B(mesh.mpmd_dim), mesh, in_specs=specs)


# With tied and stacked weights.
_SEEDS = [314]
# With a scan and 16 microbatches; in bfloat16; any.
_LONGER = [307, 329, *range(60)]


@pytest.mark.parametrize(
    "seed", [*_SEEDS, *(pytest.param(n, marks=pytest.mark.soak) for n in _LONGER)]
)
def test_random_models(seed: int) -> None:
    case = make_case(seed)
    equal = {"explicit axes", "mapped"}.intersection(case.options)
    if case.ranks < 2 or not case.axes or equal:
        assert seed not in _SEEDS
        pytest.skip("a case without ranks of unequal meshes")
    run_case(case, unequal_mesh(case))


def test_gradients_are_reduced_once() -> None:
    step, arguments = step_of(problem_of(2), mesh_of((1,), (4,)))
    rows = step.compile(*arguments).cost_summary().collectives
    assert {row.rank for row in rows} == {1}
    in_loop = [row for row in rows if row.task.startswith(("fwd", "bwd"))]
    assert {row.kind for row in in_loop} <= {"all-gather"}  # of what rank 0 takes
    reduced = [row for row in rows if row.kind == "all-reduce"]
    assert reduced
    assert all(row.task.startswith("after_loop") for row in reduced)


@pytest.mark.parametrize("when", ["step", "use"])
def test_fsdp(when: str) -> None:
    problem, mesh = problem_of(2), mesh_of((2,), (4,))
    by_rows = jax.tree.map(lambda w: P("data") if w.ndim > 1 else P(), problem.params)
    specs = (by_rows, None, P(None, "data"))
    assert_trains_equal(problem, jaxpp.Std1F1B(2), mesh, in_specs=specs, fsdp=when)


# --- Arrays -------------------------------------------------------------------------------


def test_placements() -> None:
    mesh = mesh_of((1,), (4,))
    problem = problem_of(2)
    step, arguments = step_of(problem, mesh)
    (params, *_), _ = step.compile(*arguments).in_shardings
    assert [p["w"].mesh.devices.shape for p in params] == [(1, 1), (1, 4)]
    placed = jax.tree.map(jax.device_put, problem.params, params)
    sizes = [[s.data.shape for s in p["w"].addressable_shards] for p in placed]
    assert sizes == [[(16, 16)], [(4, 16)] * 4]
    found = step(placed, *arguments[1:])
    expected = step(*arguments)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("sizes", [((1,), (4,)), ((4,), (2,))])
def test_large_arrays_of_jax(sizes: Any) -> None:
    """Ranks can use their memory without a copy."""
    x = jnp.arange(4 * 8 * 16.0 * 128).reshape(4, 8, 16, 128) / 1e6
    w = jnp.eye(256)[:, :128], jnp.eye(256)[:, 128:] + jnp.eye(256)[:, :128]

    def step(w: Any, x: Any) -> Any:
        def loss(x: Any) -> Any:
            return jnp.sum(jaxpp.mark_stage_end(x @ w[0].T) @ w[1])

        return jaxpp.treduce(loss, x, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    run = jaxpp.mpmd_jit_with_loop(step, mesh_of(*sizes), in_specs=(P(), P(None, "data")))
    for _ in range(2):
        np.testing.assert_allclose(run(w, x), jax.jit(step)(w, x), rtol=1e-5)


def test_a_value_of_both_ranks_is_whole_on_each_device() -> None:
    mesh = mesh_of((1,), (4,))
    whole = np.arange(8, dtype=np.float32)
    array = jax.device_put(whole, jaxpp.MpmdSharding(mesh, [0, 1], P()))
    assert len(array.addressable_shards) == 5
    assert all(np.array_equal(shard.data, whole) for shard in array.addressable_shards)

    def step(w: Any, xs: Any) -> Any:
        def loss(x: Any) -> Any:
            return jnp.mean(jaxpp.mark_stage_end(x * w) * w)

        total = jaxpp.treduce(loss, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)
        return w + 1, total

    run = jaxpp.mpmd_jit_with_loop(step, mesh, donate_argnums=0)
    for k in range(3):
        array, _ = run(array, jnp.ones((2, 8)))
        assert array.mpmd_idxs == (0, 1)
        copies = [np.asarray(copy) for copy in array.to_mpmd_local_array]
        assert all(np.array_equal(copy, whole + k + 1) for copy in copies)


def test_a_plan_in_a_file(tmp_path: pathlib.Path) -> None:
    mesh = mesh_of((1,), (4,))
    step, arguments = step_of(problem_of(2), mesh)
    compiled = step.compile(*arguments)
    path = tmp_path / "plan"
    compiled.save(path)
    for loaded in (jaxpp.load(path), jaxpp.load(path, mesh)):
        results = (jax.tree.leaves(run(*arguments)) for run in (loaded, compiled))
        assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(jaxpp.JaxppError, match=r"expected ranks with meshes of \{.*'data': 1"):
        jaxpp.load(path, make_mesh(2, data=4))


# --- Meshes -------------------------------------------------------------------------------


@pytest.mark.own_devices
def test_a_list_of_equal_meshes_is_a_mesh() -> None:
    whole = make_mesh(2, data=2)
    assert jaxpp.MpmdMesh(whole.unstack, "stage") == whole
    groups = np.array(jax.devices()[:4]).reshape(2, 2)
    assert jaxpp.MpmdMesh([Mesh(group, ("data",)) for group in groups], "stage") == whole


def test_facts_of_a_mesh() -> None:
    mesh = mesh_of((1,), (2,), (1,))
    devices = jax.devices()
    assert mesh.mpmd_dim == 3
    assert mesh.devices_of(1) == devices[1:3]
    assert [mesh.device_coords[d] for d in devices[:4]] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert mesh.mpmd_submesh([0, 2]).jax_mesh.shape == {"stage": 2, "data": 1}
    assert mesh.mpmd_submesh([2, 1]).unequal == (mesh.unstack[2], mesh.unstack[1])
    assert mesh == mesh_of((1,), (2,), (1,)) != mesh_of((2,), (1,), (1,))


def _own(count: int, first: int = 0, *, explicit: bool = False, name: str = "data") -> Mesh:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(np.array(jax.devices()[first : first + count]), (name,), axis_types=(kind,))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: [], r"jax_mesh=\[\]; expected a mesh for each rank"),
        (lambda: [_own(1), 3], r"jax_mesh\[1\]=3; expected a jax.sharding.Mesh"),
        (lambda: [_own(1), _own(2, 1, name="model")], r"jax_mesh\[1\] has the axes \('stage'"),
        (lambda: [_own(2, name="stage")], r"jax_mesh\[0\] has size 2 along 'stage'"),
        (lambda: [_own(2), _own(1, 1)], "ranks 0 and 1 share device"),
        (
            lambda: [_own(2, explicit=True), _own(1, 2, explicit=True)],
            "expected axes of type Auto for ranks of unequal meshes",
        ),
    ],
)
def test_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(jaxpp.JaxppError, match=text):
        jaxpp.MpmdMesh(make(), "stage")


def test_a_sharding_over_ranks_of_unequal_meshes() -> None:
    mesh = mesh_of((1,), (2,))
    with pytest.raises(jaxpp.JaxppError, match="each device has the whole array"):
        jaxpp.MpmdSharding(mesh, [0, 1], P("data"))
    assert jaxpp.MpmdSharding(mesh, [1], P("data")).mesh == mesh.unstack[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_map_has_code_for_one_size(rank: int) -> None:
    mesh = mesh_of((1,), (4,))

    def on_shards(x: Any, w: Any) -> Any:
        run = jax.shard_map(
            lambda x, w: jnp.tanh(x @ w),
            mesh=mesh.lowering_mesh(),
            in_specs=(P("data"), P()),
            out_specs=P("data"),
        )
        return run(x, w)

    def loss(w: Any, x: Any) -> Any:
        for k in range(2):
            x = on_shards(x, w[k]) if k == rank else jnp.tanh(x @ w[k])
            x = jaxpp.mark_stage_end(x)
        return jnp.mean(x)

    def step(w: Any, xs: Any) -> Any:
        return jaxpp.treduce(lambda x: loss(w, x), xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    run = jaxpp.mpmd_jit_with_loop(step, mesh)
    w, xs = [jnp.eye(8) / 2] * 2, jnp.ones((4, 8, 8))
    if rank == 0:
        with pytest.raises(jaxpp.JaxppError, match="task fwd_0 has a shard_map, whose code is"):
            run(w, xs)
    else:
        expected = 4 * jnp.mean(jnp.tanh(jnp.tanh(xs[0] @ w[0]) @ w[1]))
        assert float(run(w, xs)) == pytest.approx(float(expected), rel=1e-5)

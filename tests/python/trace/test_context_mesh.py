"""Inside a step, JAX's context mesh is the mesh of one rank, whichever mesh the user sets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import Problem, assert_trains_equal, make_mesh, no_mark

pytestmark = pytest.mark.own_devices

AXES = {"1 device": {}, "4 devices": {"data": 2, "model": 2}}
SCHEDULE = jaxpp.Std1F1B(2)


@pytest.fixture(params=list(AXES))
def mesh(request: pytest.FixtureRequest) -> jaxpp.MpmdMesh:
    return make_mesh(2, **AXES[request.param])


@pytest.fixture
def explicit(mesh: jaxpp.MpmdMesh) -> jaxpp.MpmdMesh:
    whole = mesh.jax_mesh
    types = (AxisType.Explicit,) * len(whole.axis_names)
    return jaxpp.MpmdMesh(Mesh(whole.devices, whole.axis_names, axis_types=types), "stage")


def split(mesh: jaxpp.MpmdMesh) -> P:
    return P("data") if "data" in mesh.jax_mesh.axis_names else P()


def problem_of(wrap: Callable[[Any], Any], ends: Callable[[Any], Any] = no_mark) -> Problem:
    """Two stages of two layers; in the pipeline, each layer is wrapped in `wrap`."""

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        layer = models.layer if mark is no_mark else wrap(models.layer)
        x = mb["x"]
        for k, p in enumerate(params):
            x = layer(p, x)
            if k % 2:
                x = mark(x)
        x = x if mark is no_mark else ends(x)
        return models.mse(x, mb["y"]), ()

    return Problem(loss, models.weights(4), models.batch(4))


def scanned_problem(wrap: Callable[[Any], Any]) -> Problem:
    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        layer = models.layer if mark is no_mark else wrap(models.layer)
        x = mb["x"]
        for stage in params:
            x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, stage)
            x = mark(x)
        return models.mse(x, mb["y"]), ()

    stages = [
        jax.tree.map(lambda *ws: jnp.stack(ws), *models.weights(2, seed=s)) for s in (0, 1)
    ]
    return Problem(loss, stages, models.batch(4))


PROBLEMS = {"written out": problem_of, "under scan": scanned_problem}


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_set_mesh_around_a_step(make: Any, mesh: Any) -> None:
    with jax.set_mesh(mesh.jax_mesh):
        assert_trains_equal(make(lambda layer: layer), SCHEDULE, mesh)


@pytest.mark.sample(4)
@pytest.mark.parametrize("named", ["no", "the whole", "a rank's"])
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_shard_map(make: Any, named: str, mesh: Any) -> None:
    meshes = {"no": {}, "the whole": mesh.jax_mesh, "a rank's": mesh.lowering_mesh()}
    given = {"mesh": meshes[named]} if named != "no" else {}

    def wrap(layer: Any) -> Any:
        spec = split(mesh)
        return jax.shard_map(layer, in_specs=(P(), spec), out_specs=spec, **given)

    assert_trains_equal(make(wrap), SCHEDULE, mesh)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_constraints_on_the_whole_mesh(make: Any, mesh: Any) -> None:
    def wrap(layer: Any) -> Any:
        sharding = NamedSharding(mesh.jax_mesh, split(mesh))
        return lambda p, x: jax.lax.with_sharding_constraint(layer(p, x), sharding)

    assert_trains_equal(make(wrap), SCHEDULE, mesh)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_jit_with_shardings_on_the_whole_mesh(make: Any, mesh: Any) -> None:
    def wrap(layer: Any) -> Any:
        sharding = NamedSharding(mesh.jax_mesh, split(mesh))
        return jax.checkpoint(jax.jit(layer, out_shardings=sharding))

    assert_trains_equal(make(wrap), SCHEDULE, mesh)


@pytest.mark.sample(2)
@pytest.mark.parametrize("around", [False, True], ids=["alone", "under set_mesh"])
def test_explicit_axes(around: bool, explicit: Any) -> None:
    problem = problem_of(lambda layer: layer)
    if not around:
        assert_trains_equal(problem, SCHEDULE, explicit)
        return
    with jax.set_mesh(explicit.jax_mesh):
        assert_trains_equal(problem, SCHEDULE, explicit)


@pytest.mark.parametrize("whole", [False, True], ids=["a spec", "the whole mesh"])
def test_reshard(whole: bool, explicit: Any) -> None:
    spec = split(explicit)
    target = NamedSharding(explicit.jax_mesh, spec) if whole else spec

    def wrap(layer: Any) -> Any:
        return lambda p, x: layer(p, jax.reshard(x, target))

    problem = problem_of(wrap, lambda x: jax.reshard(x, P()))
    assert_trains_equal(problem, SCHEDULE, explicit)


def test_after_a_step_the_context_is_what_it_was(mesh: Any) -> None:
    before = jax.sharding.get_abstract_mesh()
    assert_trains_equal(problem_of(lambda layer: layer), SCHEDULE, mesh, steps=1)
    assert jax.sharding.get_abstract_mesh() == before
    with jax.set_mesh(mesh.jax_mesh):
        assert_trains_equal(problem_of(lambda layer: layer), SCHEDULE, mesh, steps=1)
        assert jax.sharding.get_abstract_mesh() == mesh.jax_mesh.abstract_mesh


def placed(problem: Problem, mesh: Any) -> Iterator[Any]:
    """The batch placed on the whole mesh: replicated, split, and also split over the ranks."""
    whole, data = mesh.jax_mesh, split(mesh)
    for spec in (P(), P(None, *data), P("stage", *data)):
        yield jax.device_put(problem.batch, NamedSharding(whole, spec))


def test_shardings_of_arguments_are_the_specs(mesh: Any) -> None:
    problem = problem_of(lambda layer: layer)
    data = split(mesh)
    wanted = [P(), P(None, *data), P(None, *data)]
    for batch, spec in zip(placed(problem, mesh), wanted, strict=True):
        ours = jaxpp.mpmd_jit_with_loop(lambda batch: total(problem, batch), mpmd_mesh=mesh)
        traced = ours.trace_and_place(batch)
        found = [traced.specs.of(placed.value) for placed in traced.staged.args()][:2]
        assert found == [spec, spec] or not data
        expected = total(problem, problem.batch)
        np.testing.assert_allclose(np.asarray(ours(batch)), expected, rtol=1e-5)


def total(problem: Problem, batch: Any) -> Any:
    def one(mb: Any) -> Any:
        return problem.loss(problem.params, mb, 0, jaxpp.mark_stage_end)[0]

    return jaxpp.treduce(one, batch, schedule=SCHEDULE, operation=jaxpp.Add)


def test_arguments_and_constants_that_nothing_uses(mesh: Any) -> None:
    constant = jnp.arange(8.0)

    def step(used: Any, unused: Any, passed: Any) -> Any:
        def one(x: Any) -> Any:
            jax.jit(lambda c: c + 1)(constant)
            return jaxpp.mark_stage_end(jaxpp.mark_stage_end(x * 2) + 1)

        return jaxpp.treduce(one, used, schedule=SCHEDULE, operation=jaxpp.Add), passed

    ours = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh)
    given = np.arange(24, dtype=np.float32).reshape(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            found, passed = ours(given, np.ones((4, 4), np.float32), np.arange(6))
    np.testing.assert_array_equal(np.asarray(found), (given * 2 + 1).sum(0))
    np.testing.assert_array_equal(np.asarray(passed), np.arange(6))

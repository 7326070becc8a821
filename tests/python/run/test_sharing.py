"""Ranks that share devices."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
import models
from equality import assert_trains_equal, pipelined_step, usual_specs
from locations import environment


def mesh_on(groups: int, sharing: int, data: int = 1) -> jaxpp.MpmdMesh:
    """A mesh on `groups` groups of devices, each shared by `sharing` ranks."""
    devices = np.array(jax.devices()[: groups * data]).reshape(groups, data)
    return jaxpp.MpmdMesh(Mesh(devices, ("stage", "data")), "stage", ranks_per_device=sharing)


def trained(problem: Any, schedule: Any, mesh: Any, steps: int = 2) -> list[np.ndarray]:
    options: dict[str, Any] = {"in_specs": usual_specs(problem, mesh)}
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, schedule), mesh, donate_argnums=(0, 1), **options
    )
    state = (problem.params, problem.optimizer.init(problem.params))
    state = jax.tree.map(lambda leaf: leaf.copy(), state)  # because it is donated
    for _ in range(steps):
        *state, loss, _ = step(*state, problem.batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, loss))]


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.soak), True])
def test_what_is_trained_does_not_depend_on_who_shares(data: int, tied: bool) -> None:
    problem = models.transformer(4, 4, 4, tied=tied)
    apart = trained(problem, jaxpp.ZeroBubble(4), mesh_on(4, 1, data))
    for groups, sharing in [(2, 2), (1, 4)]:
        found = trained(problem, jaxpp.ZeroBubble(4), mesh_on(groups, sharing, data))
        for a, b in zip(found, apart, strict=True):
            np.testing.assert_array_equal(a, b)


def test_eight_ranks_on_one_device_train_as_plain_jax_does() -> None:
    problem = models.mlp([1] * 8, 8)
    assert_trains_equal(problem, jaxpp.Std1F1B(8), mesh_on(1, 8))
    assert_trains_equal(problem, jaxpp.Interleaved1F1B(8, 4), mesh_on(1, 4))


def test_a_mesh_that_names_a_device_again_is_the_same() -> None:
    first, second = jax.devices()[:2]
    types = (AxisType.Auto,)
    again = jaxpp.MpmdMesh(Mesh([first, first, second, second], ("x",), axis_types=types), "x")
    shared = jaxpp.MpmdMesh(
        Mesh([first, second], ("x",), axis_types=types), "x", ranks_per_device=2
    )
    assert shared == again and hash(shared) == hash(again)
    assert (shared.mpmd_dim, shared.ranks_per_device) == (4, 2)
    assert shared.device_mpmd_idx == {first: 0, second: 2}
    assert shared.mpmd_idx_for_mesh == {shared.unstack[0]: 0, shared.unstack[2]: 2}
    assert shared.mpmd_submesh([1, 2]).ranks_per_device == 1
    assert shared.devices_of(1) == [first]


def test_an_array_lies_once_on_a_device_that_its_ranks_share() -> None:
    mesh = mesh_on(2, 2)
    sharding = jaxpp.MpmdSharding(mesh, {1, 2, 3}, P())
    assert sharding.device_set == set(jax.devices()[:2])
    assert jax.device_put(np.ones(4), sharding).sharding.device_set == sharding.device_set
    step = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(4)), mesh)
    params, loss = step(m.params(4), m.batch(4))
    assert [leaf.mpmd_idxs for leaf in params] == [(0,), (1,), (2,), (3,)]
    assert params[1].devices() == {jax.devices()[0]}
    (shard,) = params[1].addressable_shards
    np.testing.assert_array_equal(shard.data, params[1])
    assert jnp.isfinite(loss)


def test_an_array_made_by_hand_names_a_device_for_each_rank() -> None:
    mesh = mesh_on(1, 2)
    sharding = jaxpp.MpmdSharding(mesh, (0, 1), P())
    arrays = [jax.device_put(np.ones(4), sharding.rank_sharding(rank)) for rank in (0, 1)]
    made = jaxpp.MpmdArray(arrays, sharding)
    assert made.mpmd_idxs == (0, 1) and len(made.addressable_shards) == 1
    with pytest.raises(jaxpp.JaxppError, match="expected one array per rank"):
        jaxpp.MpmdArray([*arrays, arrays[0]], sharding)


def test_what_ranks_on_one_device_take_adds_up() -> None:
    def step(mesh: Any, **options: Any) -> Any:
        return jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.GPipe(4)), mesh, **options)

    arguments = m.params(4), m.batch(4)
    summary = step(mesh_on(4, 1)).trace_and_place(*arguments).plan.summary()
    peaks = [rank.peak_bytes for rank in summary]
    assert len(set(peaks)) > 1
    mesh = mesh_on(1, 4)
    step(mesh, memory_limit=sum(peaks))(*arguments)
    step(mesh, memory_limit=peaks)(*arguments)
    refused = f"ranks 0, 1, 2, 3, on the same devices: expected at most {sum(peaks) - 1} bytes"
    with pytest.raises(jaxpp.JaxppError, match=refused):
        step(mesh, memory_limit=sum(peaks) - 1)(*arguments)
    with pytest.raises(jaxpp.JaxppError, match=f"rank 3: expected at most {peaks[3] - 1}"):
        step(mesh, memory_limit=[*peaks[:3], peaks[3] - 1])(*arguments)
    found = jaxpp.Auto(memory_limit=sum(peaks), seconds=0.1)
    jaxpp.mpmd_jit_with_loop(m.training_step(found), mesh, memory_limit=peaks)(*arguments)


def test_a_plan_of_ranks_on_one_device_runs_where_there_is_one(tmp_path: pathlib.Path) -> None:
    devices = np.array(jax.devices()[5:6])
    mesh = jaxpp.MpmdMesh(Mesh(devices, ("stage",)), "stage", ranks_per_device=4)
    arguments = m.params(4), m.batch(4)
    step = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(4)), mesh)
    _, loss = step(*arguments)
    step.compile(*arguments).save(tmp_path / "step.plan")
    script = (
        "import sys, jaxpp, mistakes as m\n"
        "_, loss = jaxpp.load(sys.argv[1])(m.params(4), m.batch(4))\n"
        "print(float(loss), [d.id for d in loss.devices()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "step.plan")],
        capture_output=True,
        text=True,
        env=environment(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1"),
    )
    assert done.stdout == f"{float(loss)} [0]\n", done.stderr


def test_a_plan_file_keeps_who_shares(tmp_path: pathlib.Path) -> None:
    mesh = mesh_on(2, 2)
    arguments = m.params(4), m.batch(4)
    step = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(4)), mesh)
    compiled = step.compile(*arguments)
    compiled.save(tmp_path / "step.plan")
    loaded = jaxpp.load(tmp_path / "step.plan")
    for a, b in zip(
        *map(jax.tree.leaves, (loaded(*arguments), compiled(*arguments))), strict=True
    ):
        assert a.mpmd_idxs == b.mpmd_idxs and a.devices() == b.devices()
        np.testing.assert_array_equal(a, b)

"""What users try at the prompt with an MpmdArray, a mesh and a schedule."""

from __future__ import annotations

import collections
import copy
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from equality import make_mesh, some_devices
from jaxpp.api import FusedTask, MpmdArray, Task, TaskType


def through(value: Any, mesh: Any = None, **options: Any) -> Any:
    """Passes a pytree through a step, which returns its arrays on all ranks."""
    mesh = mesh or make_mesh(2)
    return jaxpp.mpmd_jit_with_loop(lambda x: x, mesh, **options)(value)


@pytest.fixture(scope="module")
def matrix() -> MpmdArray:
    return through(np.arange(6, dtype=np.float32).reshape(2, 3))


@pytest.fixture(scope="module")
def scalar() -> MpmdArray:
    return through(np.float32(2.5))


@pytest.fixture(scope="module")
def trained() -> Any:
    step = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(2)), make_mesh(2))
    return step(m.params(), m.batch())


# --- Attributes and printing ------------------------------------------------------------


def test_attributes(matrix: MpmdArray) -> None:
    assert matrix.shape == (2, 3)
    assert matrix.dtype == np.float32
    assert (matrix.ndim, matrix.size, len(matrix)) == (2, 6, 2)
    assert matrix.spec == P()
    assert matrix.mpmd_idxs == (0, 1)
    assert matrix.is_mpmd_replicated
    assert not matrix.weak_type
    assert matrix.aval.shape == (2, 3)


def test_where_a_trained_state_lives(trained: Any) -> None:
    (first, second), total = trained
    assert (first.mpmd_idxs, second.mpmd_idxs, total.mpmd_idxs) == ((0,), (1,), (1,))
    assert not first.is_mpmd_replicated
    assert isinstance(first.sharding, jaxpp.MpmdSharding)
    assert first.sharding.mesh_ids == (0,)
    assert first.sharding.mpmd_mesh == make_mesh(2)


def test_printing(matrix: MpmdArray, scalar: MpmdArray) -> None:
    text = "MpmdArray(shape=(2, 3), dtype=float32, mpmd_idxs=(0, 1), sharding=NamedSharding("
    assert repr(matrix).startswith(text)
    assert str(matrix) == f"{matrix}" == str(np.asarray(matrix))
    assert str(scalar) == f"{scalar}" == "2.5"
    assert f"loss {scalar:.3f}" == "loss 2.500"
    assert f"{scalar:>8}" == "     2.5"
    shard = matrix.addressable_shards[0]
    fields = f"device={shard.device!r}, index={shard.index!r}, replica_id=0"
    assert repr(shard) == f"MpmdShard({fields})"


def test_what_prints_as_where_it_lies() -> None:
    large, small = (through(np.ones(n, np.float32)) for n in (1 << 18, (1 << 18) - 1))
    assert str(large) == f"{large}" == repr(large)
    assert str(small).startswith("[1. 1.")
    key = through(jax.random.key(0))
    assert str(key) == f"{key}" == repr(key)


@pytest.mark.own_devices
def test_sharding_prints_only_the_ranks_that_hold_it(trained: Any) -> None:
    some_devices(2)
    assert "'stage': 1" in repr(trained[0][0])
    assert "'stage': 2" in repr(through(np.ones(2)))


# --- Conversions ------------------------------------------------------------------------


def test_as_numpy(matrix: MpmdArray) -> None:
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(matrix, expected)
    np.testing.assert_array_equal(np.asarray(matrix), expected)
    assert np.asarray(matrix, np.int32).dtype == np.int32
    assert np.array(matrix, copy=True).dtype == np.float32
    np.testing.assert_array_equal(matrix[1], expected[1])
    np.testing.assert_array_equal(matrix[:, 1:], expected[:, 1:])
    np.testing.assert_array_equal(list(matrix), expected)
    assert matrix[1, 2] == 5.0
    assert matrix.tolist() == expected.tolist()
    assert np.sum(matrix) == 15.0


def test_as_python_numbers(scalar: MpmdArray) -> None:
    assert float(scalar) == 2.5
    assert int(scalar) == 2
    assert complex(scalar) == 2.5
    assert bool(scalar) is True
    assert scalar.item() == 2.5
    matrix = through(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    assert (matrix.item(4), matrix.item(1, 2)) == (4.0, 5.0)
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(matrix, dtype=np.float64, copy=False)
    assert float(through(np.ones((1, 1)))) == 1.0
    assert ["a", "b"][through(np.int32(1))] == "b"
    assert range(through(np.int32(3))) == range(3)


def test_what_a_sequence_needs_is_a_type_error(matrix: MpmdArray, scalar: MpmdArray) -> None:
    """Python's protocols require a TypeError here; numpy arrays raise one too."""
    for attempt in (lambda: len(scalar), lambda: iter(scalar), lambda: hash(matrix)):
        with pytest.raises(TypeError):
            attempt()
    with pytest.raises(TypeError, match="an array of float32 cannot be an index"):
        operator.index(scalar)


def test_as_jax_arrays(matrix: MpmdArray, trained: Any) -> None:
    arrays = matrix._partially_addressable_arrays
    assert type(arrays) is collections.OrderedDict
    assert list(arrays) == [0, 1]
    for rank, array in arrays.items():
        assert isinstance(array, jax.Array)
        assert array.devices() == set(make_mesh(2).devices_of(rank))
        np.testing.assert_array_equal(array, matrix)
    both = matrix.to_mpmd_local_array
    assert isinstance(both, list) and len(both) == 2
    first = matrix.first_mpmd_replica
    assert list(first.sharding.mesh.devices.flat) == make_mesh(2).devices_of(0)
    local = trained[0][1].to_mpmd_local_array
    assert isinstance(local, jax.Array)
    assert local.devices() == set(make_mesh(2).devices_of(1))


def test_it_mixes_with_tracers(matrix: MpmdArray) -> None:
    """A step or a jitted function may close over an MpmdArray, which becomes a constant."""
    doubled = jax.jit(lambda x: x + matrix)(jnp.ones(3))
    np.testing.assert_array_equal(doubled, np.asarray(matrix) + 1)
    stepped = jaxpp.mpmd_jit_with_loop(lambda x: matrix * x, make_mesh(2))(jnp.float32(2))
    np.testing.assert_array_equal(stepped, 2 * np.asarray(matrix))


def test_in_pytrees(trained: Any) -> None:
    state, _ = trained
    assert jax.tree.map(lambda x: x.shape, state) == [(4, 4), (4, 4)]
    assert jax.tree.structure(state) == jax.tree.structure(m.params())
    sums = jax.tree.map(np.sum, state)
    assert all(isinstance(s, jax.Array) for s in sums)
    assert all(jax.tree.leaves(jax.tree.map(lambda x: isinstance(x, MpmdArray), state)))


# --- Its memory -------------------------------------------------------------------------


def test_waiting(trained: Any) -> None:
    assert jax.block_until_ready(trained) is not None
    array = trained[0][0]
    assert array.block_until_ready() is array


def test_deleting() -> None:
    array = through(np.ones(3))
    assert not array.is_deleted()
    array.delete()
    array.delete()
    assert array.is_deleted()
    assert repr(array) == "MpmdArray(shape=(3,), dtype=float32, deleted)"
    assert str(array) == repr(array)
    assert array.shape == (3,)
    for look in (np.asarray, jax.block_until_ready, lambda x: x.first_mpmd_replica, list):
        with pytest.raises(jaxpp.JaxppError) as caught:
            look(array)
        assert caught.value.code == "donated"


# --- Every kind of element --------------------------------------------------------------

DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
]


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (2, 1, 3)], ids=str)
def test_every_dtype_and_shape(shape: tuple[int, ...]) -> None:
    values = {}
    for name in DTYPES:
        dtype = jnp.dtype(name)
        values[name] = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for given, found in zip(
        jax.tree.leaves(values), jax.tree.leaves(through(values)), strict=True
    ):
        assert found.dtype == given.dtype and found.shape == shape
        np.testing.assert_array_equal(np.asarray(found), given)
        replica = found.first_mpmd_replica
        assert replica.dtype == given.dtype
        np.testing.assert_array_equal(np.asarray(replica), given)


def test_double_width_numbers_become_single_as_in_jax() -> None:
    doubles, longs = through((np.ones(2, np.float64), np.ones(2, np.int64)))
    assert (doubles.dtype, longs.dtype) == (np.float32, np.int32)


def test_weak_types_stay_weak() -> None:
    count, rate = through((1, 0.5))
    assert count.weak_type and rate.weak_type
    assert count.first_mpmd_replica.weak_type
    assert f"{rate:.1f}" == "0.5"
    again = through(count)
    assert again.weak_type and int(again) == 1


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys(impl: str) -> None:
    key = jax.random.key(7, impl=impl)

    def step(keys: Any) -> Any:
        return jax.random.split(keys["key"], 2), jax.random.uniform(keys["key"], (3,)), keys

    step = jaxpp.mpmd_jit_with_loop(step, make_mesh(2))
    halves, numbers, keys = step({"key": key})
    assert halves.shape == (2,) and halves.dtype == key.dtype
    replica = halves.first_mpmd_replica
    expected = jax.random.split(key, 2)
    assert (jax.random.key_data(replica) == jax.random.key_data(expected)).all()
    assert (jax.random.key_data(halves[1]) == jax.random.key_data(expected[1])).all()
    assert len(list(halves)) == 2
    np.testing.assert_array_equal(numbers, jax.random.uniform(key, (3,)))
    np.testing.assert_array_equal(step(keys)[1], numbers)
    assert "key<" in repr(halves)
    with pytest.raises(jaxpp.JaxppError, match="key_data"):
        np.asarray(halves)


def test_sharded_arrays() -> None:
    mesh = make_mesh(2, data=2, model=2)
    host = np.arange(32, dtype=np.float32).reshape(4, 8)
    for spec in (P("data"), P("data", "model"), P(None, ("model", "data")), P()):
        array = through(host, mesh, in_specs=(spec,), out_specs=spec)
        assert array.spec == spec
        np.testing.assert_array_equal(array, host)
        replica = array.first_mpmd_replica
        assert replica.sharding == NamedSharding(mesh.unstack[0], spec)
        np.testing.assert_array_equal(replica, host)


# --- Meshes -----------------------------------------------------------------------------


@pytest.mark.own_devices
def test_mesh() -> None:
    mesh = make_mesh(4, data=2)
    ids = np.arange(8).reshape(4, 2)
    assert mesh.mpmd_dim == 4
    assert mesh.mpmd_axis_name == "stage"
    assert [one.device_ids.tolist() for one in mesh.unstack] == [[row] for row in ids.tolist()]
    assert all(one.axis_names == ("stage", "data") for one in mesh.unstack)
    assert mesh.mpmd_submesh([1, 3]).jax_mesh.device_ids.tolist() == ids[[1, 3]].tolist()
    assert dict(mesh.mpmd_submesh((1, 3)).jax_mesh.shape) == {"stage": 2, "data": 2}
    assert dict(mesh.lowering_mesh().shape) == {"stage": 1, "data": 2}
    assert mesh.my_mpmd_axis_index == 0
    assert mesh == make_mesh(4, data=2)
    assert mesh != make_mesh(2, data=2)
    assert hash(mesh) == hash(make_mesh(4, data=2))
    assert mesh.mpmd_axis == 0
    assert mesh.device_coords[jax.devices()[5]] == (2, 1)
    assert mesh.device_mpmd_idx == {d: d.id // 2 for d in jax.devices()[:8]}
    assert [mesh.mpmd_idx_for_mesh[one] for one in mesh.unstack] == [0, 1, 2, 3]
    assert mesh.my_mpmd_group_mesh == mesh.unstack[0]
    part = mesh.mpmd_submesh([3, 1])
    assert isinstance(part, jaxpp.MpmdMesh) and part.mpmd_dim == 2
    assert part.unstack == [mesh.unstack[3], mesh.unstack[1]]


def test_pipeline_axis_need_not_come_first() -> None:
    devices = np.array(some_devices(8)).reshape(2, 4)
    mesh = jaxpp.MpmdMesh(Mesh(devices, ("data", "pipe")), "pipe")
    assert mesh.mpmd_dim == 4
    assert mesh.unstack[1].device_ids.tolist() == [[1], [5]]
    np.testing.assert_array_equal(through(np.ones(3), mesh), np.ones(3))


def test_mesh_is_a_context() -> None:
    mesh = make_mesh(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh.__enter__()
        mesh.__exit__(None, None, None)
    with mesh as entered:
        assert entered is mesh
        assert jaxpp.MpmdMesh.mesh_stack == [mesh]
        assert jax._src.mesh.thread_resources.env.physical_mesh == mesh.jax_mesh
        np.testing.assert_array_equal(through(np.ones(3), mesh), np.ones(3))
    assert jaxpp.MpmdMesh.mesh_stack == []
    with mesh.jax_mesh:
        np.testing.assert_array_equal(through(np.ones(3), mesh), np.ones(3))


@pytest.mark.own_devices
def test_mpmd_sharding() -> None:
    mesh = make_mesh(4, data=2)
    sharding = jaxpp.MpmdSharding(mesh, (1, 2), P("data"))
    plain = NamedSharding(mesh.mpmd_submesh((1, 2)).jax_mesh, P("data"))
    assert isinstance(sharding, NamedSharding) and isinstance(sharding, jax.sharding.Sharding)
    assert sharding == plain == sharding.sharding and hash(sharding) == hash(plain)
    assert repr(sharding) == repr(plain)
    assert sharding.is_equivalent_to(plain, 1)
    assert sharding.rank_sharding(2) == NamedSharding(mesh.unstack[2], P("data"))
    assert sharding == jaxpp.MpmdSharding(mesh, {2, 1}, P("data"))
    assert sharding != jaxpp.MpmdSharding(mesh, (1, 3), P("data"))
    assert sharding.device_set == set(jax.devices()[2:6]) and sharding.num_devices == 4
    assert sharding.shard_shape((8, 3)) == (4, 3)
    assert sharding.is_fully_addressable and not sharding.is_fully_replicated
    rows = {d.id: i[0] for d, i in sharding.devices_indices_map((8,)).items()}
    halves = [slice(0, 4, None), slice(4, 8, None)]
    assert rows == {2: halves[0], 3: halves[1], 4: halves[0], 5: halves[1]}
    again = copy.copy(sharding)
    assert again == sharding and again.mesh_ids == (1, 2) and again.mpmd_mesh == mesh


def test_a_sharding_without_the_pipeline_axis() -> None:
    mesh = make_mesh(2, data=2)
    for given, kept in [
        (P("stage"), P()),
        (P(("stage", "data")), P("data")),
        (P(None, "stage"), P()),
        (P(None, "data", None), P(None, "data", None)),
    ]:
        assert jaxpp.MpmdSharding(mesh, {0}, given).spec == kept
    with pytest.raises(jaxpp.JaxppError, match="each rank once"):
        jaxpp.MpmdSharding(mesh, (0, 0), P())
    with pytest.raises(jaxpp.JaxppError, match="ranks from 0 to 1"):
        jaxpp.MpmdSharding(mesh, {2}, P())


# --- Schedules --------------------------------------------------------------------------


def listing(schedule: Any, microbatches: int, rank: int) -> list[str]:
    return [str(e) for e in schedule.tasks(microbatches)[rank]]


def test_printed_listings() -> None:
    """Schedules print as in NVIDIA's tutorial."""
    four = jaxpp.Interleaved1F1B(num_stages=4, mpmd_dim=4)
    assert listing(four, 4, 2) == (
        "fwd_2__0 fwd_2__1 fwd_2__2 bwd_2__0 fwd_2__3 bwd_2__1 bwd_2__2 bwd_2__3".split()
    )
    assert listing(four, 4, 3) == [f"FusedTask(fwd_3__{k}, bwd_3__{k})" for k in range(4)]
    eight = jaxpp.Interleaved1F1B(num_stages=8, mpmd_dim=4)
    assert (
        listing(eight, 4, 0)
        == (
            "fwd_0__0 fwd_0__1 fwd_0__2 fwd_0__3 fwd_4__0 fwd_4__1 fwd_4__2 fwd_4__3 "
            "bwd_4__0 bwd_4__1 bwd_4__2 bwd_4__3 bwd_0__0 bwd_0__1 bwd_0__2 bwd_0__3"
        ).split()
    )
    assert listing(eight, 4, 3) == [
        *(f"fwd_3__{k}" for k in range(4)),
        *(f"FusedTask(fwd_7__{k}, bwd_7__{k})" for k in range(4)),
        *(f"bwd_3__{k}" for k in range(4)),
    ]


@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_1f1b_runs_a_forward_then_a_backward(microbatches: int) -> None:
    for rank, row in enumerate(jaxpp.Std1F1B(4).tasks(microbatches)):
        named = [str(task) for task in row if task]
        warmup = min(4 - rank, microbatches)
        expected = [f"fwd_{rank}__{k}" for k in range(warmup)]
        for k in range(microbatches):
            expected.append(f"bwd_{rank}__{k}")
            if warmup + k < microbatches:
                expected.append(f"fwd_{rank}__{warmup + k}")
        assert named == expected
        assert len(row) == 2 * (microbatches + 3)


def test_gpipe_listing() -> None:
    rows = jaxpp.GPipe(3).tasks(2)
    assert [str(t) for t in rows[1] if t] == ["fwd_1__0", "fwd_1__1", "bwd_1__0", "bwd_1__1"]
    assert rows[1][0] is None


def test_tasks() -> None:
    task = Task(2, 0, TaskType.BWD)
    assert (task.stage_id, task.mubatch_idx, task.fwd_or_bwd) == (2, 0, TaskType.BWD)
    assert [Task(0, 0, kind).latency for kind in TaskType] == [1, 2, 1, 1]
    assert Task(0, 0, TaskType.FWD, 5).latency == 5
    assert str(Task(1, 3, TaskType.BWD_I)) == "bwd_i_1__3"
    assert task == Task(2, 0, TaskType.BWD) and hash(task) == hash(Task(2, 0, TaskType.BWD))
    fused = FusedTask((Task(3, 0, TaskType.FWD), Task(3, 0, TaskType.BWD)))
    assert str(fused) == repr(fused) == "FusedTask(fwd_3__0, bwd_3__0)"
    assert isinstance(fused, tuple) and len(fused) == 2


@pytest.mark.parametrize(
    "schedule",
    [
        jaxpp.Std1F1B(4),
        jaxpp.Eager1F1B(4),
        jaxpp.GPipe(4),
        jaxpp.ZeroBubble(4),
        jaxpp.Interleaved1F1B(8, 4),
        jaxpp.Interleaved1F1B(8, 4, fuse_steady_state=True),
        jaxpp.InterleavedGPipe(8, 4),
        jaxpp.KimiK2(8, 4),
        jaxpp.DualPipeV(8, 4),
    ],
    ids=repr,
)
def test_a_schedules_lists_are_a_schedule(schedule: Any) -> None:
    """A user's subclass may return the lists that tasks() of another schedule returns."""

    class Copied(jaxpp.BaseSchedule):
        def tasks(self, n_mubatches: int) -> Any:
            return schedule.tasks(n_mubatches)

    built = Copied(schedule.num_stages).build(8, 4)
    assert built.rows() == schedule.build(8, 4).rows()
    kinds = {(t.kind, t.stage, t.microbatch) for row in built.rows() for t in row if t.kind}
    assert len(kinds) == sum(1 for row in built.rows() for t in row if t.kind)


def test_a_users_schedule_trains() -> None:
    numpy_numbers = m.UserSchedule(
        lambda rows: [
            [
                FusedTask([Task(np.int64(t.stage_id), np.int32(t.mubatch_idx), t.fwd_or_bwd)])
                for t in row
            ]
            for row in rows
        ]
    )
    for schedule in (m.UserSchedule(), numpy_numbers):
        step = jaxpp.mpmd_jit_with_loop(m.training_step(schedule), make_mesh(2))
        ws, total = step(m.params(), m.batch())
        expected = m.plain_training_step(m.params(), m.batch())
        np.testing.assert_allclose(total, expected[1], rtol=1e-5)
        np.testing.assert_allclose(ws[0], expected[0][0], rtol=1e-5)


def test_names_in_the_api() -> None:
    for name in jaxpp.__all__:
        assert getattr(jaxpp, name).__doc__, name

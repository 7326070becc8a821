"""Arrays made from JAX arrays, copies of arrays, their shards and their pickles."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from array_placements import WHOLE, by_parts
from equality import make_mesh
from jaxpp.api import MpmdArray, MpmdSharding

ROWS = np.arange(32, dtype=np.float32).reshape(8, 4)
PLACED: dict[str, Callable[[Any], MpmdArray]] = {
    **WHOLE,
    "by parts": by_parts,
    "by parts, sharded": lambda x: by_parts(x, data=2),
    "by columns": lambda x: by_parts(x, along=1),
    "by columns, sharded": lambda x: by_parts(x, along=1, data=2),
}


def on_ranks(x: Any, sharding: MpmdSharding) -> list[jax.Array]:
    return [jax.device_put(x, sharding.rank_sharding(rank)) for rank in sharding.mesh_ids]


# --- Arrays made from JAX arrays --------------------------------------------------------


@pytest.mark.own_devices
def test_an_array_of_jax_arrays() -> None:
    mesh = make_mesh(2, data=2)
    sharding = MpmdSharding(mesh, (0, 1), P("data"))
    arrays = on_ranks(ROWS, sharding)
    made = MpmdArray(arrays, sharding)
    assert (made.shape, made.dtype, made.mpmd_idxs) == ((8, 4), jnp.float32, (0, 1))
    assert made.sharding == sharding and made.spec == P("data") and made.is_mpmd_replicated
    assert made.is_partially_addressable and made.is_fully_addressable
    assert repr(made).startswith("MpmdArray(shape=(8, 4), dtype=float32, mpmd_idxs=(0, 1), ")
    # The replicas are the given arrays, not copies.
    assert made.first_mpmd_replica is arrays[0]
    assert all(a is b for a, b in zip(made.to_mpmd_local_array, arrays, strict=True))
    assert made._partially_addressable_arrays == dict(enumerate(arrays))
    np.array(made)[:] = 0  # a copy
    np.testing.assert_array_equal(made, ROWS)
    assert MpmdArray(arrays[::-1], sharding).first_mpmd_replica is arrays[0]
    assert MpmdArray(arrays, sharding, shape=(8, 4), dtype=jnp.float32).shape == (8, 4)


def test_a_step_takes_one_wherever_it_needs_it() -> None:
    mesh = make_mesh(2)
    step = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(2)), mesh)
    expected = m.plain_training_step(m.params(), m.batch())
    for ranks in ((0,), (1,), (0, 1)):
        sharding = MpmdSharding(mesh, ranks, P())
        ws = [MpmdArray(on_ranks(w, sharding), sharding) for w in m.params()]
        for _ in range(2):  # the step does not move or delete the arrays
            found, total = step(ws, m.batch())
            np.testing.assert_allclose(total, expected[1], rtol=1e-5)
            np.testing.assert_allclose(found[0], expected[0][0], rtol=1e-5)
            assert all(w.mpmd_idxs == ranks and w.sharding == sharding for w in ws)
        np.testing.assert_array_equal(ws[0], m.params()[0])


def test_a_step_takes_the_shards_as_they_lie() -> None:
    mesh = make_mesh(2, data=2)
    step = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, mesh, in_specs=(P("data"),))
    for spec in (P("data"), P(None), P()):
        sharding = MpmdSharding(mesh, (0, 1), spec)
        arrays = on_ranks(ROWS, sharding)
        made = MpmdArray(arrays, sharding)
        np.testing.assert_array_equal(step(made), ROWS + 1)
        assert made.sharding == sharding
        uploaded = made._values[0]
        np.testing.assert_array_equal(step(made), ROWS + 1)
        assert made._values[0] is uploaded  # not uploaded again
        for array in arrays:
            array.delete()  # `made` now has its own memory
        np.testing.assert_array_equal(made, ROWS)
    other = make_mesh(2)
    sharding = MpmdSharding(other, (1,), P())
    made = MpmdArray(on_ranks(ROWS, sharding), sharding)  # on a mesh other than the step's
    np.testing.assert_array_equal(step(made), ROWS + 1)
    assert made.mpmd_idxs == (1,) and made.sharding == sharding


def test_what_device_put_makes_goes_into_a_step() -> None:
    """`jax.device_put(x, MpmdSharding(...))` gives a jax.Array with that sharding."""
    mesh = make_mesh(2, data=2)
    sharding = MpmdSharding(mesh, {1}, P("data"))
    put = jax.device_put(ROWS, sharding)
    assert isinstance(put.sharding, MpmdSharding) and put.devices() == sharding.device_set
    doubled = jax.jit(lambda x: 2 * x)(put)
    assert isinstance(doubled.sharding, NamedSharding)
    assert doubled.sharding.is_equivalent_to(sharding, 2)
    step = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, mesh)
    assert step.compile(put)._inputs[0].spec == P("data")  # its sharding is kept
    np.testing.assert_array_equal(step(put), ROWS + 1)
    np.testing.assert_array_equal(step(doubled), 2 * ROWS + 1)


def test_a_donated_one_is_deleted() -> None:
    mesh = make_mesh(2)
    sharding = MpmdSharding(mesh, (1,), P())
    for of_mesh in (mesh, make_mesh(2, data=2)):  # the array's mesh, then another
        made = MpmdArray(on_ranks(ROWS, sharding), sharding)
        step = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, of_mesh, donate_argnums=0)
        np.testing.assert_array_equal(step(made), ROWS + 1)
        assert made.is_deleted() and "deleted" in repr(made)
        with pytest.raises(jaxpp.JaxppError, match="expected an array, found one that was"):
            step(made)
        with pytest.raises(jaxpp.JaxppError, match="use what the step returned"):
            made.block_until_ready()


def test_keys_and_weak_types_by_hand() -> None:
    mesh = make_mesh(2)
    sharding = MpmdSharding(mesh, (0, 1), P())
    keys = jax.random.split(jax.random.key(0), 3)
    made = MpmdArray(on_ranks(keys, sharding), sharding)
    step = jaxpp.mpmd_jit_with_loop(lambda k: jax.random.bits(k[1]), mesh)
    assert int(step(made)) == int(jax.random.bits(keys[1])) == int(jax.random.bits(made[1]))
    weak = MpmdArray(on_ranks(jnp.asarray(2.0), sharding), sharding)
    assert weak.weak_type and (weak * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_an_array_of_which_this_process_has_nothing() -> None:
    sharding = MpmdSharding(make_mesh(2, data=2), (0, 1), P("data"))
    array = MpmdArray([], sharding, shape=(8, 4), dtype=jnp.float32)
    assert array.shape == (8, 4) and array.dtype == jnp.float32 and array.mpmd_idxs == (0, 1)
    assert array.sharding == sharding and array.addressable_shards == []
    assert not array.is_partially_addressable and not array.is_fully_addressable
    assert "float32" in repr(array) and array.block_until_ready() is array
    step = jaxpp.mpmd_jit_with_loop(lambda x: x * 2, sharding.mpmd_mesh)
    assert step.eval_shape(array).shape == (8, 4)
    for look in (np.asarray, step, lambda x: x + 1):
        text = "which holds no copy of it|x: expected this process to hold the part"
        with pytest.raises(jaxpp.JaxppError, match=text) as caught:
            look(array)
        assert caught.value.code == "mesh"
    array.delete()
    assert array.is_deleted()


def test_a_saved_step_has_the_arrays_it_closes_over(tmp_path: Any) -> None:
    w, key = WHOLE["sharded"](ROWS), WHOLE["by hand"](jax.random.key(0))
    step = jaxpp.mpmd_jit_with_loop(lambda x: (x * w, jax.random.bits(key)), make_mesh(2))
    step.compile(np.float32(2)).save(tmp_path / "plan")
    doubled, bits = jaxpp.load(tmp_path / "plan")(np.float32(2))
    np.testing.assert_array_equal(doubled, 2 * ROWS)
    assert int(bits) == int(jax.random.bits(jax.random.key(0)))


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (
            lambda s: MpmdArray([ROWS], s),
            "invalid-argument",
            "array 0: expected a jax.Array on",
        ),
        (
            lambda s: MpmdArray([], s),
            "sharding",
            "expected an array on each of the ranks [0, 1]",
        ),
        (lambda s: MpmdArray(on_ranks(ROWS, s)[:1], s), "sharding", "found them on [0]"),
        (
            lambda s: MpmdArray(on_ranks(ROWS, s) * 2, s),
            "sharding",
            "expected one array per rank",
        ),
        (lambda s: MpmdArray([jnp.asarray(ROWS)] * 2, s), "sharding", "sharded by"),
        (
            lambda s: MpmdArray([on_ranks(ROWS, s)[0], on_ranks(ROWS[:4], s)[1]], s),
            "invalid-argument",
            "the same shape and dtype, found float32[4, 4], float32[8, 4]",
        ),
        (
            lambda s: MpmdArray(on_ranks(ROWS, s), s, shape=(3,)),
            "invalid-argument",
            "of shape=(3,), dtype=None, found float32[8, 4]",
        ),
        (
            lambda s: MpmdArray(on_ranks(ROWS, s), s, dtype=jnp.int8),
            "invalid-argument",
            "found float32[8, 4]",
        ),
        (
            lambda s: MpmdArray(on_ranks(ROWS, s), s.sharding),
            "sharding",
            "expected an MpmdSharding",
        ),
    ],
)
def test_what_can_not_be_made(make: Callable[[Any], Any], code: str, text: str) -> None:
    sharding = MpmdSharding(make_mesh(2, data=2), (0, 1), P("data"))
    with pytest.raises(jaxpp.JaxppError) as caught:
        make(sharding)
    assert caught.value.code == code and text in str(caught.value)


# --- Copies and shards ------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACED)
def test_copies_lie_the_same_and_live_on(place: str) -> None:
    array = PLACED[place](ROWS)
    copies = [array.copy(), copy.copy(array), copy.deepcopy({"a": array})["a"]]
    placement = type(array._placement)
    array.delete()
    for each in copies:
        assert type(each) is MpmdArray and type(each._placement) is placement
        assert each.mpmd_idxs == array.mpmd_idxs and each.sharding == array.sharding
        np.testing.assert_array_equal(each, ROWS)
    copies[0].delete()
    np.testing.assert_array_equal(copies[1], ROWS)


@pytest.mark.own_devices
@pytest.mark.parametrize("place", PLACED)
def test_shards_put_together_are_the_array(place: str) -> None:
    array = PLACED[place](ROWS)
    whole, count = np.full_like(ROWS, np.nan), np.zeros(ROWS.shape, int)
    for shard in array.addressable_shards:
        assert shard.data.devices() == {shard.device}
        np.testing.assert_array_equal(shard.data, ROWS[shard.index])
        count[shard.index] += shard.replica_id == 0
        whole[shard.index] = shard.data
    np.testing.assert_array_equal(whole, ROWS)
    assert (count == 1).all()  # each element has exactly one shard with replica_id 0
    assert {s.device for s in array.global_shards} == array.devices()
    np.testing.assert_array_equal(array.addressable_data(0), array.addressable_shards[0].data)
    bytes_of_shards = sum(s.data.nbytes for s in array.addressable_shards)
    assert array.on_device_size_in_bytes() == bytes_of_shards
    assert array.is_fully_addressable and array.is_partially_addressable
    several = len(array.devices()) > 1
    assert array.device == (array.sharding if several else array.addressable_shards[0].device)
    assert array.is_fully_replicated == all(
        shard.data.shape == array.shape for shard in array.addressable_shards
    )
    assert array.copy_to_host_async() is None


@pytest.mark.own_devices
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("along", [0, 1])
def test_the_sharding_of_an_array_in_parts(along: int, axes: dict[str, int]) -> None:
    """The sharding describes the parts of each rank and can be given to a step or to orbax."""
    array = by_parts(ROWS, along, **axes)
    assert isinstance(array.sharding, MpmdSharding) and array.sharding.mesh_ids == (0, 1)
    shape = list(ROWS.shape)
    shape[along] //= 2
    shape[1 - along] //= array.sharding.mesh.shape.get("data", 1)
    assert array.sharding.shard_shape(array.shape) == tuple(shape)
    assert (
        copy.copy(array.sharding)
        == array.sharding
        != MpmdSharding(array.sharding.mpmd_mesh, (0, 1), array.spec)
    )
    put = jax.device_put(ROWS, array.sharding)
    mesh = array.sharding.mpmd_mesh
    step = jaxpp.mpmd_jit_with_loop(
        lambda x: x + 1, mesh, in_shardings=(array.sharding,), out_shardings=array.sharding
    )
    for argument in (array, put, ROWS):
        found = step(argument)
        np.testing.assert_array_equal(found, ROWS + 1)
        assert found.spec == array.spec


@pytest.mark.own_devices
def test_parts_of_unequal_size_are_the_shards() -> None:
    mesh = make_mesh(2)

    def step(stacked: Any, scale: Any) -> Any:
        def loss(stacked: Any, scale: Any) -> Any:
            y = jaxpp.mark_stage_end(jnp.sin(scale * jnp.sum(stacked[:1])))
            return jaxpp.mark_stage_end(jnp.sin(y * jnp.sum(stacked[1:])))

        schedule = jaxpp.Std1F1B(2)
        grads = jaxpp.treduce(
            lambda s: jax.grad(loss)(stacked, s), scale, schedule, operation=jaxpp.Add
        )
        return stacked - 0 * grads

    array = jaxpp.mpmd_jit_with_loop(step, mesh)(ROWS[:3], jnp.ones(2))
    assert [part.aval.shape for part in array._placement.parts] == [(1, 4), (2, 4)]
    assert array.sharding == MpmdSharding(mesh, (0, 1), P())
    devices = mesh.unstack[0].size
    shapes = [shard.data.shape for shard in array.addressable_shards]
    assert shapes == [(1, 4)] * devices + [(2, 4)] * devices
    np.testing.assert_array_equal(array.addressable_data(devices), ROWS[1:3])
    assert array.on_device_size_in_bytes() == devices * array.nbytes


# --- Pickles ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACED)
def test_pickled_by_value(place: str) -> None:
    array = PLACED[place](ROWS)
    again = pickle.loads(pickle.dumps({"w": array}))["w"]
    assert isinstance(again, jax.Array) and type(again) is not MpmdArray
    np.testing.assert_array_equal(again, ROWS)


def test_pickles_keep_the_type() -> None:
    step = jaxpp.mpmd_jit_with_loop(lambda x: x, make_mesh(2))
    low, weak, key = step((jnp.ones(3, jnp.bfloat16), 0.5, jax.random.key(1, impl="rbg")))
    again = pickle.loads(pickle.dumps((low, weak, key)))
    assert again[0].dtype == jnp.bfloat16 and again[1].weak_type
    assert again[2].dtype == key.dtype
    assert (jax.random.key_data(again[2]) == jax.random.key_data(key)).all()


def test_a_pickle_does_not_need_this_package(tmp_path: Any) -> None:
    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps(WHOLE["replicated"](ROWS)))
    script = (
        "import pickle, sys\n"
        "sys.modules['jaxpp'] = None\n"
        "print(pickle.load(open(sys.argv[1], 'rb')).sum())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "496.0", done.stderr


def test_a_deleted_one_is_not_pickled() -> None:
    array = WHOLE["replicated"](ROWS)
    array.delete()
    with pytest.raises(jaxpp.JaxppError, match="use what the step returned in its place"):
        pickle.dumps(array)

"""Memory shared by JAX's client and the runtime's: JAX reads results in place, steps read JAX
arrays in place, and neither sees its data change."""

from __future__ import annotations

import gc
import pathlib
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from equality import make_mesh, mesh_of, some_devices
from jaxpp.api import MpmdArray, MpmdSharding
from jaxpp.client import lending
from jaxpp.client.devices import LocalDevices
from jaxpp.client.plugins import platform_of
from jaxpp.run.arguments import Source, _given_of_shardings
from locations import environment

SIZE = 256  # rows and columns: large enough that the memory is shared
ROWS = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)


def on_ranks(
    x: Any, ranks: tuple[int, ...] = (0,), spec: P | None = None, **axes: int
) -> MpmdArray:
    """An array with the contents of x in the runtime's memory."""
    mesh = mesh_of(2, axes)
    sharding = MpmdSharding(mesh, ranks, P() if spec is None else spec)
    return jaxpp.spmd_to_mpmd_reshard(mesh, np.asarray(x), sharding)


def address(array: MpmdArray, rank: int | None = None, device: int = 0) -> int:
    """The address of a shard in the runtime's memory."""
    rank = array.mpmd_idxs[0] if rank is None else rank
    where = lending.DEVICE_TYPES[platform_of(jax.devices()[0])], 0
    capsule = array._values[0].lend(rank, device, *where, False)
    seen = jax.dlpack.from_dlpack(lending.Lent(capsule, where))
    return int(seen.unsafe_buffer_pointer())


# Memory on an accelerator is copied for JAX, on the device.
on_host = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="JAX uses results where they lie on CPUs only"
)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list of the sizes of all shards and blocks that are copied to devices."""
    sizes: list[int] = []
    put = LocalDevices.put

    def counted(self: Any, ranks: Any, indices: Any, shards: Any, dtype: str) -> Any:
        sizes.extend(shard.nbytes for shard in shards)
        return put(self, ranks, indices, shards, dtype)

    def reading(host: Any) -> Any:
        def read(self: Any, block: int, dtype: str) -> np.ndarray:
            array: np.ndarray = host(self, block, dtype)
            sizes.append(array.nbytes)
            return array

        return read

    monkeypatch.setattr(LocalDevices, "put", counted)
    for source in Source.__subclasses__():
        if "host" in vars(source):
            monkeypatch.setattr(source, "host", reading(source.host))
    yield sizes


# --- JAX reads the runtime's memory -------------------------------------------------------


@on_host
def test_jax_uses_a_result_where_it_lies() -> None:
    x = on_ranks(ROWS, (1,))
    there = address(x)
    for array in (x.first_mpmd_replica, x.to_mpmd_local_array, jax.device_put(x), jnp.array(x)):
        np.testing.assert_array_equal(array, ROWS)
    assert x.first_mpmd_replica.unsafe_buffer_pointer() == there
    assert x.first_mpmd_replica.sharding == x.sharding.rank_sharding(1)
    assert x.addressable_shards[0].data.unsafe_buffer_pointer() == there
    assert jax.device_put(x).unsafe_buffer_pointer() == there
    assert jax.jit(lambda x: x)(x).unsafe_buffer_pointer() != there
    np.testing.assert_array_equal(jnp.sum(x, 0), ROWS.sum(0))
    copied = np.asarray(x)
    assert copied.ctypes.data != there and copied.flags.writeable


@on_host
def test_each_rank_and_each_shard_is_used_where_it_lies() -> None:
    x = on_ranks(ROWS, (0, 1), P("data"), data=2)
    arrays = x.to_mpmd_local_array
    for rank, array in enumerate(arrays):
        assert array.sharding == x.sharding.rank_sharding(rank)
        np.testing.assert_array_equal(array, ROWS)
        for number, shard in enumerate(array.addressable_shards):
            assert shard.data.unsafe_buffer_pointer() == address(x, rank, number)
    for shard in x.addressable_shards:
        rank, number = divmod(shard.device.id, 2)
        assert shard.data.unsafe_buffer_pointer() == address(x, rank, number)
        np.testing.assert_array_equal(shard.data, ROWS[shard.index])
    whole = on_ranks(ROWS, (1,), P(), data=2)
    assert jax.device_put(whole).unsafe_buffer_pointer() == address(whole)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint16", "bfloat16", "float16", "complex64", "float8_e4m3fn", "int4"],
)
def test_any_type_is_looked_at(dtype: str) -> None:
    values = (np.arange(64) % 5).reshape(8, 8).astype(jnp.dtype(dtype))
    x = on_ranks(values)
    seen = x.first_mpmd_replica
    assert seen.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(seen), values)
    np.testing.assert_array_equal(np.asarray(jnp.concatenate([x, x])), np.tile(values, (2, 1)))


def test_what_has_no_elements_or_one_is_looked_at() -> None:
    for values in (np.zeros((0, 3), np.float32), np.float32(2.5)):
        np.testing.assert_array_equal(on_ranks(values).first_mpmd_replica, values)


def test_jax_may_donate_or_delete_what_it_sees() -> None:
    x = on_ranks(ROWS)
    seen = x.first_mpmd_replica
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    np.testing.assert_array_equal(add(seen), ROWS + 1)
    np.testing.assert_array_equal(add(x), ROWS + 1)
    x.first_mpmd_replica.delete()
    np.testing.assert_array_equal(x, ROWS)


def double_and_add(w: Any, x: Any) -> Any:
    return w * 2 + x, jnp.sum(w)


def donating_step(**axes: int) -> Callable[..., Any]:
    specs = (P("data"), P("data")) if axes else None
    return jaxpp.mpmd_jit_with_loop(
        double_and_add, mesh_of(2, axes), donate_argnums=0, in_specs=specs
    )


@on_host
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=["1-device", "2-devices"])
def test_a_donated_array_stays_for_who_looks(axes: dict[str, int]) -> None:
    step = donating_step(**axes)
    w, total = step(ROWS, np.ones_like(ROWS))
    expected = ROWS * 2 + 1
    there = [address(w, device=d) for d in range(max(axes.values(), default=1))]
    seen = w.first_mpmd_replica
    next_w, total = step(w, np.ones_like(ROWS))
    assert w.is_deleted()
    with pytest.raises(jaxpp.JaxppError, match="donated"):
        jnp.sum(w)
    np.testing.assert_array_equal(next_w, expected * 2 + 1)
    np.testing.assert_allclose(total, expected.sum(dtype=np.float64), rtol=1e-4)
    np.testing.assert_array_equal(seen, expected)
    shards = [shard.data.unsafe_buffer_pointer() for shard in seen.addressable_shards]
    assert shards == there
    assert address(next_w) != there[0]


@on_host
def test_who_looked_before_costs_no_copy() -> None:
    """Once JAX has released a donated array, the step overwrites it in place."""
    step = donating_step()
    w, _ = step(ROWS, np.ones_like(ROWS))
    there = address(w)
    jnp.sum(w).block_until_ready()
    del_me = w.first_mpmd_replica
    del del_me
    gc.collect()
    w, _ = step(w, np.ones_like(ROWS))
    assert address(w) == there


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_seen_never_changes(seed: int) -> None:
    """Random sequences of steps, borrowed arrays, their releases and deletions."""
    choose = random.Random(seed)
    axes = {"data": 2} if seed % 2 else {}
    step = donating_step(**axes)
    x = np.ones_like(ROWS)
    now = ROWS % 7
    w, _ = step(now, x)
    now = now * 2 + x
    seen: list[tuple[Any, np.ndarray]] = []
    looks: list[Callable[[MpmdArray], Any]] = [
        lambda w: w.first_mpmd_replica,
        jax.device_put,
        lambda w: w.addressable_shards[0].data,
        lambda w: w + 0,
    ]
    for _ in range(40):
        action = choose.randrange(5)
        if action == 0:
            given = choose.choice([x, jnp.asarray(x)])
            w, _ = step(w, given)
            now = (now * 2 + x) % np.float32(2**20)
            w = w % np.float32(2**20)
        elif action == 1:
            array = choose.choice(looks)(w)
            rows = array.shape[0]
            seen.append((array, now[:rows].copy()))
        elif action == 2 and seen:
            seen.pop(choose.randrange(len(seen)))
        elif action == 3 and isinstance(w, MpmdArray):
            copied = w.copy()
            w.delete()
            w = copied
        elif action == 4:
            gc.collect()
        for array, expected in seen:
            np.testing.assert_array_equal(array, expected)
        if not isinstance(w, MpmdArray):
            w = step(w, np.zeros_like(x))[0]
            now = now * 2
    np.testing.assert_array_equal(w, now)


def test_threads_look_while_a_step_donates() -> None:
    step = donating_step()
    state = [step(np.zeros_like(ROWS), np.zeros_like(ROWS))[0]]
    failures: list[Any] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                seen = state[0].first_mpmd_replica
            except jaxpp.JaxppError as error:
                if error.code != "donated":
                    failures.append(error)
                continue
            before = float(seen[0, 0])
            if not (np.asarray(seen) == before).all():
                failures.append(before)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        state[0] = step(state[0], np.ones_like(ROWS))[0]
    jax.block_until_ready(state[0])
    done.set()
    for thread in threads:
        thread.join()
    assert not failures


# --- A step reads JAX's memory ------------------------------------------------------------


def test_a_step_takes_an_array_of_jax_where_it_lies(uploads: list[int]) -> None:
    add = jaxpp.mpmd_jit_with_loop(lambda w, x: w + x, make_mesh(2))
    x = jnp.asarray(ROWS)
    np.testing.assert_array_equal(add(x, x), ROWS * 2)
    assert uploads == []
    np.testing.assert_array_equal(add(x, ROWS), ROWS * 2)
    assert uploads  # a numpy array is copied, as the user may change it
    np.testing.assert_array_equal(x, ROWS)


def test_shards_are_taken_where_they_lie(uploads: list[int]) -> None:
    mesh = mesh_of(2, {"data": 2})
    add = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, mesh, in_specs=(P("data"),))
    x = jax.device_put(ROWS, MpmdSharding(mesh, (0,), P("data")).rank_sharding(0))
    np.testing.assert_array_equal(add(x), ROWS + 1)
    made = jax.device_put(ROWS, MpmdSharding(mesh, (0, 1), P("data")))
    np.testing.assert_array_equal(add(made), ROWS + 1)
    assert uploads == []
    # An array with a different sharding has to be cut.
    np.testing.assert_array_equal(add(jnp.asarray(ROWS)), ROWS + 1)
    assert uploads


def test_what_looks_at_a_donated_array_of_jax_does_not_change(uploads: list[int]) -> None:
    step = donating_step()
    x = jnp.asarray(ROWS)
    ones, seen = jnp.ones_like(x), np.asarray(x)
    w, _ = step(x, ones)
    assert set(uploads) == {x.nbytes}  # copied, because the step overwrites it
    assert x.is_deleted()
    for _ in range(3):
        w, _ = step(w, ones)
    np.testing.assert_array_equal(seen, ROWS)
    np.testing.assert_array_equal(w, ((ROWS * 2 + 1) * 2 + 1) * 4 + 3)


def test_a_donated_array_made_by_hand_leaves_its_parts_alone(uploads: list[int]) -> None:
    mesh = mesh_of(2, {})
    step = jaxpp.mpmd_jit_with_loop(double_and_add, mesh, donate_argnums=0)
    sharding = MpmdSharding(mesh, (0,), P())
    part = jax.device_put(ROWS, sharding.rank_sharding(0))
    made = MpmdArray([part], sharding)
    w, _ = step(made, jnp.ones_like(part))
    assert uploads == [ROWS.nbytes] and made.is_deleted()
    np.testing.assert_array_equal(w, ROWS * 2 + 1)
    np.testing.assert_array_equal(part, ROWS)


@on_host
def test_a_donated_array_that_another_step_took_where_it_lies(uploads: list[int]) -> None:
    """A step that overwrites borrowed memory copies it first."""
    mesh = mesh_of(2, {})
    sharding = MpmdSharding(mesh, (0,), P())
    part = jax.device_put(ROWS, sharding.rank_sharding(0))
    made = MpmdArray([part], sharding)
    jaxpp.mpmd_jit_with_loop(lambda x: x + 1, mesh)(made)
    assert address(made) == part.unsafe_buffer_pointer()
    step = jaxpp.mpmd_jit_with_loop(double_and_add, mesh, donate_argnums=0)
    ones = jnp.ones_like(part)
    w, _ = step(made, ones)
    assert uploads == [] and made.is_deleted()
    for _ in range(3):
        w, _ = step(w, ones)
    np.testing.assert_array_equal(w, ((ROWS * 2 + 1) * 2 + 1) * 4 + 3)
    np.testing.assert_array_equal(part, ROWS)


def test_jax_may_delete_or_donate_what_a_step_takes() -> None:
    add = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, make_mesh(2))
    for end in (lambda x: x.delete(), jax.jit(lambda x: x * 0, donate_argnums=0)):
        for _ in range(5):
            x = jnp.asarray(ROWS)
            result = add(x)
            end(x)
            np.testing.assert_array_equal(result, ROWS + 1)
    sharding = MpmdSharding(make_mesh(2), (0,), P())
    part = jax.device_put(ROWS, sharding.rank_sharding(0))
    made = MpmdArray([part], sharding)
    add(made)
    part.delete()
    np.testing.assert_array_equal(add(made), ROWS + 1)
    np.testing.assert_array_equal(made, ROWS)


def test_an_array_goes_when_its_step_is_done() -> None:
    add = jaxpp.mpmd_jit_with_loop(lambda x: jnp.sum(x), make_mesh(2))
    x = jnp.asarray(ROWS)
    gone = weakref.ref(x)
    total = add(x)
    del x
    np.testing.assert_allclose(total, ROWS.sum(dtype=np.float64), rtol=1e-4)
    jax.block_until_ready(add(np.zeros_like(ROWS)))  # steps finish in order
    gc.collect()
    assert gone() is None


def test_arrays_go_round_between_both() -> None:
    add = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, make_mesh(2), donate_argnums=0)
    x: Any = jnp.asarray(ROWS)
    kept = []
    for turn in range(6):
        x = add(x).first_mpmd_replica
        kept.append(np.asarray(x))
        x = jax.jit(lambda x: x * 1)(x) if turn % 2 else x
    for turn, array in enumerate(kept):
        np.testing.assert_array_equal(array, ROWS + turn + 1)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float8_e4m3fn", "int4"])
def test_any_type_is_taken(dtype: str) -> None:
    values = jnp.asarray(np.arange(512 * 512) % 2, jnp.dtype(dtype)).reshape(512, 512)
    swap = jaxpp.mpmd_jit_with_loop(lambda x: x[::-1], make_mesh(2))
    found = np.asarray(swap(values).first_mpmd_replica)
    np.testing.assert_array_equal(found, np.asarray(values)[::-1])


def test_keys_are_taken() -> None:
    keys = jax.random.split(jax.random.key(0), 10_000)
    draw = jaxpp.mpmd_jit_with_loop(lambda k: jax.vmap(jax.random.uniform)(k), make_mesh(2))
    np.testing.assert_array_equal(draw(keys), jax.vmap(jax.random.uniform)(keys))


def test_a_training_on_jax_arrays_is_the_same() -> None:
    step = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(2)), make_mesh(2))
    expected = step(m.params(), m.batch())
    found = step(jax.tree.map(jnp.asarray, m.params()), jnp.asarray(m.batch()))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- Devices that do not share the host's memory (simulated) ------------------------------


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes each device borrow only memory of its own."""
    monkeypatch.setattr(lending, "can_share", lambda given, wanted: given == wanted)
    monkeypatch.setattr(LocalDevices, "can_borrow", lambda self, a, b: a == b)
    _given_of_shardings.cache_clear()
    yield
    _given_of_shardings.cache_clear()


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("home", [0, 1, 3])
def test_a_step_brings_an_array_to_where_it_is_needed(home: int, uploads: list[int]) -> None:
    devices = some_devices(4)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(devices[:2]), ("stage",)), "stage")

    def two_stages(xs: Any) -> Any:
        def one(x: Any) -> Any:
            y = jaxpp.mark_stage_end(jnp.sin(x))
            return jaxpp.mark_stage_end(jnp.sum(y * x))

        return jaxpp.treduce(one, xs, schedule=jaxpp.Std1F1B(2), operation=jaxpp.Add)

    step = jaxpp.mpmd_jit_with_loop(two_stages, mesh)
    x = jax.device_put(ROWS.reshape(4, -1), jax.devices()[home])
    expected = np.sum(np.sin(ROWS, dtype=np.float64) * ROWS)
    np.testing.assert_allclose(step(x), expected, rtol=1e-3)
    assert bool(uploads) == (home == 3)  # a device of neither rank
    sharding = MpmdSharding(mesh, (1,), P())
    assert jaxpp.spmd_to_mpmd_reshard(mesh, x, sharding).mpmd_idxs == (1,)


@on_host
def test_what_is_lent_beside_the_host_is_copied_on_the_device() -> None:
    x = on_ranks(ROWS)
    capsule = x._values[0].lend(0, 0, 1, 0, False)
    own = lending._copied_on_device(lending.Lent(capsule, (1, 0)))
    assert own is not None and own.unsafe_buffer_pointer() != address(x)
    np.testing.assert_array_equal(own, ROWS)
    low = on_ranks(np.zeros((4, 4), jnp.float8_e4m3fn))
    assert low._values[0].lend(0, 0, 2, 0, False) is None  # not a DLPack type
    assert low._values[0].lend(0, 0, 1, 0, True) is not None


def test_another_platform_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "platform_of", lambda device: "tpu")
    x = on_ranks(ROWS)
    np.testing.assert_array_equal(jnp.sum(x, 0), ROWS.sum(0))
    assert lending.lent_array(x._values[0], 0, 0, jax.devices()[0]) is None


SHARES = """
import test_lending as t
x = t.on_ranks(t.ROWS)
seen = t.jax.device_put(x)
t.np.testing.assert_array_equal(seen, t.ROWS)
print(seen.unsafe_buffer_pointer() == t.address(x))
"""


@on_host
@pytest.mark.parametrize(
    ("value", "said"),
    [("1", "True"), ("0", "False"), ("2", "JPP_SHARE_MEMORY='2': expected 0 or 1")],
)
def test_memory_is_shared_if_the_variable_says_so(value: str, said: str) -> None:
    here = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARES],
        env=environment(here, JAX_NUM_CPU_DEVICES="2", JPP_SHARE_MEMORY=value),
        capture_output=True,
        text=True,
    )
    lines = (done.stdout + done.stderr).splitlines()
    assert lines and lines[-1].endswith(said), lines


def test_a_small_array_is_copied_once(uploads: list[int]) -> None:
    """As long as the program passes the same array, and neither deletes nor donates it."""

    def step(w: Any, x: Any) -> Any:
        y = jaxpp.mark_stage_end(x @ w)
        return w + 1, jaxpp.mark_stage_end(y @ w)

    run = jaxpp.mpmd_jit_by_yield(step, make_mesh(2))
    w, x = jnp.eye(4), np.ones((2, 4), np.float32)
    for number in range(3):
        x[:] = number
        np.testing.assert_array_equal(run(w, x)[1], x)
    assert uploads.count(w.nbytes) == 1 and uploads.count(x.nbytes) == 3
    w = 2 * w
    np.testing.assert_array_equal(run(w, x)[1], 4 * x)
    assert uploads.count(w.nbytes) == 2
    w.delete()
    with pytest.raises(jaxpp.JaxppError, match="deleted"):
        run(w, x)
    donating = jaxpp.mpmd_jit_by_yield(step, make_mesh(2), donate_argnums=0)
    w, before = jnp.eye(4), len(uploads)
    donating(w, x)
    with pytest.raises(jaxpp.JaxppError, match="donated"):
        donating(w, x)
    donating(jnp.eye(4), x)
    assert uploads[before:].count(w.nbytes) == 2


def test_the_copy_of_a_small_array_ends_with_it() -> None:
    run = jaxpp.mpmd_jit_by_yield(lambda w: jaxpp.mark_stage_end(w * 2), make_mesh(1))
    w = jnp.ones(4)
    run(w)
    (leaf,) = run.compile(w).compiled._leaves
    (copy,) = leaf.kept(w)
    freed = weakref.ref(w)
    del w
    gc.collect()
    assert freed() is None and not leaf._kept
    del copy

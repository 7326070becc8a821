"""Explicit axes: values whose types say that each device of a rank has one term of a sum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import assert_copies_equal, assert_equal, no_mark, some_devices

WIDTH, MICROBATCHES = 8, 4
OVER_DATA = P(unreduced={"data"})
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "1 x (data 2)": (1, {"data": 2}),
    "1 x (data 4)": (1, {"data": 4}),
    "1 x (data 2, model 2)": (1, {"data": 2, "model": 2}),
    "2 x (data 1)": (2, {"data": 1}),
    "2 x (data 2)": (2, {"data": 2}),
    "2 x (data 4)": (2, {"data": 4}),
    "2 x (data 2, model 2)": (2, {"data": 2, "model": 2}),
    "4 x (data 2)": (4, {"data": 2}),
}
SCHEDULES: dict[str, Callable[[int], Any]] = {
    "1f1b": jaxpp.Std1F1B,
    "zb": jaxpp.ZeroBubble,
}


def explicit_mesh(name: str) -> jaxpp.MpmdMesh:
    ranks, axes = MESHES[name]
    shape = (ranks, *axes.values())
    devices = np.array(some_devices(int(np.prod(shape)))).reshape(shape)
    types = (AxisType.Explicit,) * len(shape)
    return jaxpp.MpmdMesh(Mesh(devices, ("stage", *axes), axis_types=types), "stage")


def mixed_mesh() -> jaxpp.MpmdMesh:
    devices = np.array(some_devices(8)).reshape(2, 2, 2)
    types = (AxisType.Explicit, AxisType.Explicit, AxisType.Auto)
    mesh = Mesh(devices, ("stage", "data", "model"), axis_types=types)
    return jaxpp.MpmdMesh(mesh, "stage")


def whole(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.reshard(a, P()), tree)


def batch_of(x: Any) -> Any:
    return jax.reshard(x, P("data", None))


def outer(x: Any) -> Any:
    """A sum over the batch. Each device has one term of it."""
    return jnp.einsum("bi,bj->ij", batch_of(x), batch_of(x), out_sharding=OVER_DATA)


def arrays(count: int, *shape: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) / 3 for _ in range(count)]


def assert_same_as_plain(
    of_microbatch: Callable[[Any, Any, Any], Any],
    weights: Any,
    mesh: jaxpp.MpmdMesh,
    schedule: Any = jaxpp.Std1F1B,
    before: Callable[[Any], Any] = lambda w: w,
    spec: Any = None,
    **options: Any,
) -> Any:
    """Asserts that the sums of `of_microbatch(weights, x, mark)` over the microbatches equal
    plain JAX's on one rank's mesh, on all devices. The weights enter the step with `spec`.
    Returns the compiled step."""
    xs = np.stack(arrays(MICROBATCHES, WIDTH, WIDTH))

    def step(weights: Any, xs: Any) -> Any:
        weights = before(weights)
        one = functools.partial(of_microbatch, weights, mark=jaxpp.mark_stage_end)
        return whole(jaxpp.treduce(one, xs, schedule(mesh.mpmd_dim), operation=jaxpp.Add))

    run = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=(spec, P(None, "data")), **options)
    compiled = run.compile(weights, xs)
    found = compiled(weights, xs)
    rank_mesh = mesh.unstack[0]
    with jax.set_mesh(rank_mesh):
        plain = jax.jit(lambda w, x: whole(of_microbatch(before(w), x, mark=no_mark)))
        weights = jax.device_put(weights, NamedSharding(rank_mesh, spec or P()))
        each = [
            jax.device_get(
                plain(weights, jax.device_put(x, NamedSharding(rank_mesh, P("data"))))
            )
            for x in xs
        ]
    assert_equal(found, jax.tree.map(lambda *values: sum(values), *each), 2e-5)
    assert_copies_equal(found, "result")
    return compiled


# --- Gradients of weights that are marked `reduced` ---------------------------------------


def layers(x: Any, ws: Any) -> Any:
    for k in range(len(ws)):  # JAX 0.11.2 does not iterate over an array of a reduced type
        x = jnp.tanh(x @ ws[k])
    return x


def scanned(x: Any, ws: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def scanned_and_checkpointed(x: Any, ws: Any) -> Any:
    body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jax.lax.scan(body, x, ws)[0]


def sharded_map(x: Any, ws: Any) -> Any:
    specs = (P("data", None), P(reduced={"data"}))
    return jax.shard_map(layers, in_specs=specs, out_specs=P("data", None))(x, ws)


STAGES = {
    "layers": layers,
    "checkpoint": jax.checkpoint(layers),
    "scan": scanned,
    "scan and checkpoint": scanned_and_checkpointed,
    "shard_map": sharded_map,
}


def reduced(weights: Any) -> Any:
    return jax.tree.map(lambda w: jax.reshard(w, P(reduced={"data"})), weights)


@pytest.mark.sample(24)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("once", [True, False], ids=["once", "each"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_of_reduced_weights(
    mesh: str, stage: str, schedule: str, once: bool, tied: bool
) -> None:
    ranks, axes = MESHES[mesh]
    if stage == "shard_map" and axes["data"] == 1:
        pytest.skip("JAX 0.10.2 cannot lower its gradient for one device")

    def loss(weights: Any, x: Any, mark: Any) -> Any:
        x = batch_of(x)
        for ws in [*weights[:-1], weights[0]] if tied else weights:
            x = mark(STAGES[stage](x, ws))
        return jnp.sum(x**2)

    weights = arrays(ranks, 2, WIDTH, WIDTH)
    compiled = assert_same_as_plain(
        jax.grad(loss),
        weights,
        explicit_mesh(mesh),
        SCHEDULES[schedule],
        reduced,
        reduce_once=once,
    )
    in_loop = [c for c in compiled.cost_summary().collectives if c.task.startswith("bwd")]
    assert bool(in_loop) == (axes["data"] > 1 and not once)


@pytest.mark.parametrize("once", [True, False], ids=["once", "each"])
@pytest.mark.parametrize("mesh", ["1 x (data 2)", "1 x (data 2, model 2)"])
def test_gradients_without_a_mark(mesh: str, once: bool) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((batch_of(x) @ w) ** 2)

    compiled = assert_same_as_plain(
        lambda w, x, mark: jax.grad(loss)(w, x),
        arrays(1, WIDTH, WIDTH)[0],
        explicit_mesh(mesh),
        before=reduced,
        reduce_once=once,
    )
    assert (compiled.cost_summary().collectives[0].task == "after_loop_0_0") == once


# --- Arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, P("data"), P(reduced={"data"})], ids=str)
@pytest.mark.parametrize("mesh", ["1 x (data 2)", "2 x (data 2)", "2 x (data 2, model 2)"])
def test_types_of_arguments_have_their_shardings(mesh: str, spec: Any) -> None:
    """The batch of a device stays on it, although the step has no reshard."""

    def loss(weights: Any, x: Any, mark: Any) -> Any:
        assert jax.typeof(x).sharding.spec == P("data", None)
        for w in weights:
            x = mark(jnp.tanh(x @ w))
            assert jax.typeof(x).sharding.spec == P("data", None)
        return jnp.sum(x**2)

    typed = P() if spec is None else spec
    compiled = assert_same_as_plain(
        jax.grad(loss),
        arrays(MESHES[mesh][0], WIDTH, WIDTH),
        explicit_mesh(mesh),
        before=lambda ws: jax.tree.map(lambda w: jax.reshard(w, typed), ws),
        spec=spec,
    )
    found = compiled.cost_summary().collectives
    whole_batch = WIDTH * WIDTH * 4
    gathered = [c for c in found if c.kind == "all-gather" and c.bytes >= whole_batch]
    assert bool(gathered) == (spec == P("data"))  # the weights
    if spec is not None and spec.reduced:
        assert not [c for c in found if c.task.startswith("bwd")]


@pytest.mark.parametrize("spec", [P(), P(None, "data")], ids=str)
@pytest.mark.parametrize(
    "mesh", ["2 x (data 2)", "2 x (data 2, model 2)", "mixed", "4 x (data 2)"]
)
@pytest.mark.parametrize("stage", ["layers", "scan"])
def test_stacked_weights_stay_with_their_stages(stage: str, mesh: str, spec: Any) -> None:
    on = mixed_mesh() if mesh == "mixed" else explicit_mesh(mesh)
    ranks = on.mpmd_dim

    def loss(w: Any, x: Any, mark: Any) -> Any:
        for k in range(ranks):
            x = mark(STAGES[stage](x, w[2 * k : 2 * k + 2]))
        return jnp.sum(x**2)

    weights = np.stack(arrays(2 * ranks, WIDTH, WIDTH))
    compiled = assert_same_as_plain(jax.grad(loss), weights, on, spec=spec)
    parts = compiled.in_shardings[0][0]
    assert parts.spec[0] == "stage"


def test_stacked_weights_that_the_step_gathers() -> None:
    def loss(w: Any, x: Any, mark: Any) -> Any:
        gathered = whole(w)
        for k in range(2):
            rows = jax.lax.stop_gradient(gathered) if k else gathered
            x = mark(layers(x, rows[2 * k : 2 * k + 2]))
        return jnp.sum(x**2)

    weights = np.stack(arrays(4, WIDTH, WIDTH))
    on, spec = explicit_mesh("2 x (data 2, model 2)"), P(None, "data", "model")
    compiled = assert_same_as_plain(jax.grad(loss), weights, on, spec=spec)
    assert compiled.in_shardings[0][0].spec[0] == "stage"


@pytest.mark.parametrize("spec", [P(None, None), P(None, "data"), P("data", None)], ids=str)
def test_sums_without_jit(spec: Any) -> None:
    mesh = explicit_mesh("2 x (data 2)")

    def loss(w: Any, x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.tanh(batch_of(x) @ whole(w)))
        return jnp.sum(x @ whole(w))

    def step(w: Any, xs: Any) -> Any:
        one = functools.partial(jax.value_and_grad(loss), w)
        total, grad = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)
        assert jax.typeof(grad).sharding.spec == spec
        return total, grad

    w, xs = arrays(1, WIDTH, WIDTH)[0], np.stack(arrays(MICROBATCHES, WIDTH, WIDTH))
    run = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=(spec, P()))
    found = run(w, xs)
    rank_mesh = mesh.lowering_mesh()
    with jax.set_mesh(rank_mesh), jax.disable_jit():
        eager = run(jax.device_put(w, NamedSharding(rank_mesh, spec)), jnp.asarray(xs))
    assert_equal(found, eager, 1e-5)


def test_rows_by_numbers_with_shardings() -> None:
    def row(w: Any, k: int) -> Any:
        return jax.lax.dynamic_index_in_dim(w, jax.reshard(jnp.int32(k), P()), keepdims=False)

    def loss(w: Any, x: Any, mark: Any) -> Any:
        for k in range(2):
            x = mark(jnp.tanh(x @ row(w, k)))
        return jnp.sum(x**2)

    weights = np.stack(arrays(2, WIDTH, WIDTH))
    compiled = assert_same_as_plain(jax.grad(loss), weights, explicit_mesh("2 x (data 2)"))
    assert compiled.in_shardings[0][0].spec[0] == "stage"


def test_stacked_weights_whose_parts_have_no_sharding() -> None:
    def loss(w: Any, x: Any) -> Any:
        for k in range(2):
            x = jaxpp.mark_stage_end(layers(x, w[2 * k : 2 * k + 2]))
        return jnp.sum(x**2)

    def rows(a: Any) -> Any:
        return jnp.reshape(a, (4 * WIDTH, WIDTH), out_sharding=P())

    def step(w: Any, xs: Any) -> Any:
        one = functools.partial(jax.grad(loss), w)
        return rows(jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add))

    spec = P(None, "data")
    args = np.stack(arrays(4, WIDTH, WIDTH)), np.stack(arrays(MICROBATCHES, WIDTH, WIDTH))
    run = jaxpp.mpmd_jit_with_loop(step, explicit_mesh("2 x (data 2)"), in_specs=spec)
    with pytest.warns(UserWarning, match="each of their ranks holds all rows"):
        found = run(*args)

    def plain(w: Any, xs: Any) -> Any:
        for k in range(4):
            xs = jnp.tanh(xs @ w[k])
        return jnp.sum(xs**2)

    assert_equal(found, jax.grad(plain)(*args).reshape(-1, WIDTH), 2e-5)
    assert_copies_equal(found, "result")


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (P("data"), r"treduce at .*: expected whole arrays along axis 0.*found xs of type"),
        (P("modle"), r"in_specs of xs: .*names axis 'modle'; expected one of"),
        (P(None, None, None, "data"), r"in_specs of xs: .*has 4 entries; expected at most 3"),
    ],
    ids=str,
)
def test_specs_of_arguments_that_do_not_fit(spec: Any, match: str) -> None:
    def step(xs: Any) -> Any:
        return jaxpp.treduce(jnp.sum, xs, jaxpp.Std1F1B(1), operation=jaxpp.Add)

    run = jaxpp.mpmd_jit_with_loop(step, explicit_mesh("1 x (data 2)"), in_specs=spec)
    with pytest.raises(jaxpp.JaxppError, match=match):
        run(np.stack(arrays(MICROBATCHES, WIDTH, WIDTH)))


@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed"])
def test_fsdp_is_refused(mixed: bool) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(whole(jaxpp.mark_stage_end(layers(x, w))) ** 2)

    def step(w: Any, xs: Any) -> Any:
        one = functools.partial(jax.value_and_grad(loss), w)
        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2))[1]

    mesh = mixed_mesh() if mixed else explicit_mesh("2 x (data 2)")
    specs = P(None, "data"), P(None, "data")
    run = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=specs, fsdp="use")
    found = r"""fsdp: w has .*'data'\); .* found "data" of type Explicit.*sharding.reshard"""
    with pytest.raises(jaxpp.JaxppError, match=found):
        run.lower(np.stack(arrays(2, WIDTH, WIDTH)), np.stack(arrays(2, WIDTH, WIDTH)))


# --- Other sums -----------------------------------------------------------------------------


def mapped(x: Any) -> Any:
    def term(x: Any) -> Any:
        return jax.lax.pcast(x.T @ x, "data", to="unreduced")

    in_specs = P("data", None)
    return jax.shard_map(term, in_specs=in_specs, out_specs=OVER_DATA)(batch_of(x))


def of_first(w: Any, x: Any) -> Any:
    return jax.reshard(w * jax.reshard(x, P())[0, 0], OVER_DATA)


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda w, x: outer(x),
    "two sums": lambda w, x: outer(x) + outer(2 * x.T),
    "a sum and its square": lambda w, x: (outer(x), whole(outer(x)) ** 2),
    "a sum, its square and itself": lambda w, x: (lambda s: (s, jnp.abs(whole(s)) ** 2, s))(
        outer(x)
    ),
    "of a shard_map": lambda w, x: mapped(x),
    "two, one of a shard_map": lambda w, x: outer(x) + mapped(x),
    "a weight": lambda w, x: jax.reshard(2 * w, OVER_DATA),
    "a weight times the batch": of_first,
    "a sum and a weight": lambda w, x: outer(x) + jax.reshard(w, OVER_DATA),
    "a sum, by a branch": lambda w, x: jax.lax.cond(
        whole(x)[0, 0] > 0, lambda s: s + s, lambda s: s, outer(x)
    ),
    "scattered": lambda w, x: jax.reshard(outer(x), P("data", None)),
}


@pytest.mark.parametrize("once", [True, False], ids=["once", "each"])
@pytest.mark.parametrize("mesh", [name for name, (ranks, _) in MESHES.items() if ranks == 1])
@pytest.mark.parametrize("what", SUMS)
def test_sums_of_an_unreduced_type(what: str, mesh: str, once: bool) -> None:
    assert_same_as_plain(
        lambda w, x, mark: SUMS[what](w, x),
        arrays(1, WIDTH, WIDTH)[0],
        explicit_mesh(mesh),
        reduce_once=once,
    )


@pytest.mark.parametrize("once", [True, False], ids=["once", "each"])
def test_sums_over_some_of_the_axes(once: bool) -> None:
    def of_microbatch(w: Any, x: Any, mark: Any) -> Any:
        both = jax.reshard(x, P(("data", "model"), None))
        s = jnp.einsum("bi,bj->ij", both, both, out_sharding=P(unreduced={"data", "model"}))
        return s, jax.reshard(s, OVER_DATA), jax.reshard(s, P("model", unreduced={"data"}))

    mesh = explicit_mesh("1 x (data 2, model 2)")
    assert_same_as_plain(of_microbatch, np.float32(0), mesh, reduce_once=once)


# --- Values that tasks exchange -----------------------------------------------------------


def loss_of_terms(weights: Any, x: Any, mark: Any) -> Any:
    first, second = weights
    by_columns, by_rows = jax.reshard(x, P(None, "data")), jax.reshard(first, P("data"))
    h = jnp.einsum("bi,ij->bj", by_columns, by_rows, out_sharding=OVER_DATA)
    return jnp.sum((whole(mark(h)) @ second) ** 2)


def test_terms_on_a_mesh_with_automatic_axes() -> None:
    match = (
        r"test_explicit.py:\d+: a value of type .* leaves a stage or the loop; JAX supports "
        "this only on meshes whose axes are all explicit, found .*'model': 'Auto'"
    )
    with pytest.raises(jaxpp.JaxppError, match=match):
        assert_same_as_plain(
            jax.value_and_grad(loss_of_terms), arrays(2, WIDTH, WIDTH), mixed_mesh()
        )


@pytest.mark.parametrize("once", [True, False], ids=["once", "each"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", [name for name, (ranks, _) in MESHES.items() if ranks == 2])
def test_terms_cross_a_stage_mark(mesh: str, schedule: str, once: bool) -> None:
    assert_same_as_plain(
        jax.value_and_grad(loss_of_terms),
        arrays(2, WIDTH, WIDTH),
        explicit_mesh(mesh),
        SCHEDULES[schedule],
        reduce_once=once,
    )


@pytest.mark.parametrize("once", [True, False], ids=["once", "each"])
@pytest.mark.parametrize("mesh", ["2 x (data 2)", "2 x (data 2, model 2)"])
def test_terms_from_before_the_loop(mesh: str, once: bool) -> None:
    def of_microbatch(terms: Any, x: Any, mark: Any) -> Any:
        h = mark(jnp.tanh(batch_of(x) @ whole(terms)))
        return outer(h) + terms, whole(terms + terms) * jnp.sum(h)

    assert_same_as_plain(
        of_microbatch,
        arrays(1, WIDTH, WIDTH)[0],
        explicit_mesh(mesh),
        before=lambda w: jax.reshard(2 * w, OVER_DATA),
        reduce_once=once,
    )


@pytest.mark.parametrize("once", [True, False], ids=["once", "each"])
@pytest.mark.parametrize("out", [None, P("data"), P("model")], ids=str)
def test_results_of_a_step_are_whole(out: Any, once: bool) -> None:
    """A result of an unreduced type, also one that the loop uses, and a loop's own result."""

    def step(w: Any, xs: Any) -> Any:
        terms = jax.reshard(2 * w, OVER_DATA)
        sums = jaxpp.treduce(
            lambda x: (outer(x), outer(x) + terms),
            xs,
            jaxpp.Std1F1B(1),
            operation=jaxpp.Add,
        )
        after = jax.reshard(sums[0] * w, OVER_DATA)
        return *sums, terms, after, whole(after + after)

    mesh = explicit_mesh("1 x (data 2, model 2)")
    w, *xs = arrays(1 + MICROBATCHES, WIDTH, WIDTH)
    run = jaxpp.mpmd_jit_with_loop(step, mesh, out_specs=out, reduce_once=once)
    found = run(w, np.stack(xs))
    total = sum(x.T @ x for x in xs)
    wanted = total, total + len(xs) * 2 * w, 2 * w, total * w, 2 * total * w
    assert_equal(found, wanted, 2e-5)
    assert_copies_equal(found, "result")


@pytest.mark.parametrize(
    ("operation", "numpys"), [(jaxpp.Max, np.max), (jaxpp.Concat(), lambda a, axis: a)]
)
def test_other_operations_take_whole_values(operation: Any, numpys: Any) -> None:
    def step(xs: Any) -> Any:
        return jaxpp.treduce(outer, xs, jaxpp.Std1F1B(1), operation=operation)

    xs = np.stack(arrays(MICROBATCHES, WIDTH, WIDTH))
    found = jaxpp.mpmd_jit_with_loop(step, explicit_mesh("1 x (data 2)"))(xs)
    assert_equal(found, numpys(np.stack([x.T @ x for x in xs]), axis=0), 2e-5)
    assert_copies_equal(found, "result")


def test_a_saved_step_has_terms(tmp_path: Any) -> None:
    def step(w: Any, xs: Any) -> Any:
        terms = jax.reshard(2 * w, OVER_DATA)
        one = lambda x: outer(x) + terms  # noqa: E731
        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(1), operation=jaxpp.Add)

    w, *xs = arrays(1 + MICROBATCHES, WIDTH, WIDTH)
    args = w, np.stack(xs)
    run = jaxpp.mpmd_jit_with_loop(step, explicit_mesh("1 x (data 2)"))
    run.compile(*args).save(tmp_path / "step.plan")
    loaded = jaxpp.load(tmp_path / "step.plan")
    assert_equal(loaded(*args), run(*args), 1e-6)


@pytest.mark.parametrize("name", ["in_specs", "out_specs"])
def test_unreduced_arguments_and_results_are_refused(name: str) -> None:
    def step(xs: Any) -> Any:
        return jaxpp.treduce(outer, xs, jaxpp.Std1F1B(1), operation=jaxpp.Add)

    mesh = explicit_mesh("1 x (data 2)")
    run = jaxpp.mpmd_jit_with_loop(step, mesh, **{name: OVER_DATA})
    with pytest.raises(jaxpp.JaxppError, match=rf"{name} of .*unreduced.*'data'.*expected"):
        run(np.stack(arrays(MICROBATCHES, WIDTH, WIDTH)))

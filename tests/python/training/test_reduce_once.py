"""Sums over the devices of a rank: results that the loop adds up are reduced once, after the
loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import (
    SUMS,
    Problem,
    assert_equal,
    assert_trains_equal,
    loop_tasks,
    mesh_of,
    pipelined_step,
)

WIDTH, LENGTH, ROWS, MICROBATCHES, WORDS = 8, 6, 4, 4, 12
AXES = {
    "2 x (data 2)": (2, {"data": 2}),
    "2 x (data 2, model 2)": (2, {"data": 2, "model": 2}),
    "4 x (data 2)": (4, {"data": 2}),
}


def layer(x: Any, p: Any) -> Any:
    return x + jnp.tanh(x @ p["up"] + p["b"]) @ p["down"]


def weights(layers: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        "layers": {
            "up": jax.random.normal(keys[0], (layers, WIDTH, 2 * WIDTH)) / 3,
            "b": jax.random.normal(keys[1], (layers, 2 * WIDTH)) / 3,
            "down": jax.random.normal(keys[2], (layers, 2 * WIDTH, WIDTH)) / 3,
        },
        "words": jax.random.normal(keys[3], (WORDS, WIDTH)) / 3,
        "head": jax.random.normal(keys[4], (WIDTH, WORDS)) / 3,
    }


def row(tree: Any, k: Any) -> Any:
    return jax.tree.map(lambda w: w[k], tree)


def unrolled(x: Any, stage: Any, apply: Any = layer) -> Any:
    for k in range(2):
        x = apply(x, row(stage, k))
    return x


def scanned(x: Any, stage: Any) -> Any:
    return jax.lax.scan(lambda h, p: (layer(h, p), None), x, stage)[0]


def checkpointed(x: Any, stage: Any) -> Any:
    return unrolled(x, stage, jax.checkpoint(layer))


def scanned_and_checkpointed(x: Any, stage: Any) -> Any:
    body = jax.checkpoint(lambda h, p: (layer(h, p), None))
    return jax.lax.scan(body, x, stage)[0]


def called(x: Any, stage: Any) -> Any:
    return unrolled(x, stage, jax.jit(layer))


def in_bfloat16(x: Any, stage: Any) -> Any:
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), stage)
    return unrolled(x.astype(jnp.bfloat16), half).astype(jnp.float32)


def of_experts(x: Any, stage: Any) -> Any:
    """Two experts per stage, its two layers. The router reuses weights of the first layer."""
    chosen = jax.nn.softmax(x @ row(stage, 0)["up"][:, :2])
    h = jnp.tanh(jnp.einsum("bsd,edf->bsef", x, stage["up"]) + stage["b"])
    return x + jnp.einsum("bsef,efd,bse->bsd", h, stage["down"], chosen)


def with_adapters(x: Any, stage: Any) -> Any:
    """Multiplies by a sum of products of weights, so that gradients have several uses."""
    w = row(stage, 0)["up"] @ row(stage, 0)["down"]
    return x + jnp.tanh(x @ (w + row(stage, 1)["up"] @ row(stage, 1)["down"]))


def recurrent(x: Any, stage: Any) -> Any:
    """Two layers of cells, whose four states all depend on each other."""

    def cell(states: Any, word: Any) -> Any:
        after, below = [], word
        for (memory, _), (_, state), k in zip(states, states[::-1], range(2), strict=True):
            p = row(stage, k)
            new, gate = jnp.split((below + state) @ p["up"] + p["b"], 2, axis=-1)
            memory = jax.nn.sigmoid(gate) * memory + jnp.tanh(new)
            below = jnp.concatenate([memory, jnp.tanh(memory)], -1) @ p["down"]
            after.append((memory, below))
        return after, below

    none = jnp.zeros_like(x[:, 0])
    _, words = jax.lax.scan(cell, [(none, none)] * 2, jnp.swapaxes(x, 0, 1))
    return x + jnp.swapaxes(words, 0, 1)


def chosen_by_the_data(x: Any, stage: Any) -> Any:
    first, second = row(stage, 0), row(stage, 1)
    x = jax.lax.cond(x.mean() > 0, lambda h: layer(h, first), lambda h: layer(2 * h, first), x)
    return jnp.where(jnp.arange(WIDTH) % 2 == 0, layer(x, second), x)


MAKERS = (
    unrolled,
    scanned,
    checkpointed,
    scanned_and_checkpointed,
    called,
    of_experts,
    with_adapters,
    recurrent,
    chosen_by_the_data,
)


def problem_of(stage: Any, stages: int, tied: bool = False) -> Problem:
    params = weights(2 * stages)
    if tied:
        del params["head"]

    def loss(p: Any, tokens: Any, i: Any, mark: Any) -> Any:
        x = p["words"][tokens]
        for s in range(stages):
            x = mark(stage(x, row(p["layers"], slice(2 * s, 2 * s + 2))))
        logits = x @ (p["words"].T if tied else p["head"])
        wanted = jax.nn.one_hot(jnp.roll(tokens, -1, 1), WORDS)
        return -(jax.nn.log_softmax(logits) * wanted).sum(-1).mean(), ()

    shape = (MICROBATCHES, ROWS, LENGTH)
    batch = jax.random.randint(jax.random.key(9), shape, 0, WORDS)
    # Adam with a small eps takes a full step even if rounding decides the sign of a gradient.
    # Rounding errors in bfloat16 are too large for Adam with any eps.
    optimizer = (
        optax.sgd(0.1, momentum=0.9) if stage is in_bfloat16 else optax.adamw(1e-2, eps=1e-3)
    )
    return Problem(loss, params, batch, optimizer)


def specs_of(problem: Problem, axes: dict[str, int], fsdp: bool = False) -> Any:
    model = "model" if "model" in axes else None
    by_name = {"up": P(None, None, model), "b": P(None, model), "down": P(None, model)}
    if fsdp:
        by_name = {"up": P(None, "data"), "b": P(None, "data"), "down": P(None, None, "data")}

    def of(path: Any, leaf: Any) -> Any:
        return by_name.get(getattr(path[-1], "key", None), P()) if np.ndim(leaf) else P()

    state = problem.optimizer.init(problem.params)
    params, state = (jax.tree_util.tree_map_with_path(of, t) for t in (problem.params, state))
    return (params, state, P(None, "data")), (params, state, P(), P())


def train(problem: Problem, schedule: Any, mesh: Any, specs: Any, **options: Any) -> Any:
    ins, outs = specs
    step = assert_trains_equal(problem, schedule, mesh, in_specs=ins, out_specs=outs, **options)
    state = problem.optimizer.init(problem.params)
    return step.compile(problem.params, state, problem.batch).cost_summary().collectives


@pytest.mark.sample(5)
@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("axes", AXES)
def test_nothing_is_reduced_in_the_loop(maker, axes):
    ranks, of_rank = AXES[axes]
    problem = problem_of(maker, ranks)
    mesh = mesh_of(ranks, of_rank)
    found = train(problem, jaxpp.Std1F1B(ranks), mesh, specs_of(problem, of_rank))
    assert loop_tasks(found, "data", *SUMS) == (
        # All devices need the mean, on which the cond branches.
        ["fwd_0", "fwd_1", "fwd_2", "fwd_3"][:ranks] if maker is chosen_by_the_data else []
    )
    if maker not in (of_experts, recurrent):  # which take some columns of sharded weights
        assert loop_tasks(found, "model", "all-gather") == []
    after = [c for c in found if c.task.startswith("after_loop") and "data" in c.axes]
    assert sum(c.times for c in after) <= 2 * ranks, after  # a task reduces all weights at once


@pytest.mark.sample(2)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    "maker",
    [unrolled, pytest.param(scanned, marks=pytest.mark.soak), checkpointed],
    ids=lambda m: m.__name__,
)
def test_split_backward(axes, maker):
    ranks, of_rank = AXES[axes]
    problem = problem_of(maker, ranks)
    mesh = mesh_of(ranks, of_rank)
    found = train(problem, jaxpp.ZeroBubble(ranks), mesh, specs_of(problem, of_rank))
    assert loop_tasks(found, "data", *SUMS) == []


@pytest.mark.parametrize("axes", AXES)
def test_tied_weights_send_partial_sums(axes):
    ranks, of_rank = AXES[axes]
    problem = problem_of(unrolled, ranks, tied=True)
    mesh = mesh_of(ranks, of_rank)
    found = train(problem, jaxpp.Std1F1B(ranks), mesh, specs_of(problem, of_rank))
    assert loop_tasks(found, "data", *SUMS) == []


def test_reduce_once_false_reduces_in_each_microbatch():
    problem = problem_of(unrolled, 2)
    mesh = mesh_of(2, {"data": 2})
    specs = specs_of(problem, {"data": 2})
    found = train(problem, jaxpp.Std1F1B(2), mesh, specs, reduce_once=False)
    assert set(loop_tasks(found, "data", *SUMS)) >= {"bwd_0", "bwd_1"}


# --- Weights that are sharded over the devices of the batch -------------------------------


def gathered(collectives: Any) -> dict[str, int]:
    """The number of weights that each task gathers in one run."""
    found: dict[str, int] = {}
    for c in collectives:
        if c.kind == "all-gather":
            runs = MICROBATCHES if "loop" not in c.task else 1
            found[c.task] = found.get(c.task, 0) + c.times // runs
    return found


FSDP_STAGES = (unrolled, checkpointed, scanned, scanned_and_checkpointed, in_bfloat16)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "schedule", [jaxpp.Std1F1B(2), jaxpp.ZeroBubble(2)], ids=["1f1b", "zb"]
)
@pytest.mark.parametrize("maker", FSDP_STAGES, ids=lambda m: m.__name__)
def test_weights_gathered_once_a_step(maker, schedule):
    problem = problem_of(maker, 2)
    mesh = mesh_of(2, {"data": 2})
    specs = specs_of(problem, {}, fsdp=True)
    tolerance = 1e-2 if maker is in_bfloat16 else 1e-5
    found = train(problem, schedule, mesh, specs, fsdp="step", tolerance=tolerance)
    tasks = gathered(found)
    assert all(task.startswith("before_loop") for task in tasks), tasks
    assert sum(tasks.values()) in (6, 12), tasks  # three weights per stage or per layer
    assert loop_tasks(found, "data", *SUMS) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("maker", FSDP_STAGES, ids=lambda m: m.__name__)
def test_weights_gathered_at_each_use(maker):
    problem = problem_of(maker, 2)
    mesh = mesh_of(2, {"data": 2})
    specs = specs_of(problem, {}, fsdp=True)
    tolerance = 1e-2 if maker is in_bfloat16 else 1e-5
    found = train(problem, jaxpp.Std1F1B(2), mesh, specs, fsdp="use", tolerance=tolerance)
    tasks = gathered(found)
    assert not any("before_loop" in task for task in tasks), tasks
    assert {"fwd_0", "fwd_1", "bwd_1"} <= set(tasks), tasks
    assert loop_tasks(found, "data", *SUMS) == []


def test_split_backwards_gather_once_for_both_halves():
    problem = problem_of(unrolled, 2)
    mesh = mesh_of(2, {"data": 2})
    specs = specs_of(problem, {}, fsdp=True)
    tasks = gathered(train(problem, jaxpp.ZeroBubble(2), mesh, specs, fsdp="use"))
    whole = gathered(train(problem, jaxpp.Std1F1B(2), mesh, specs, fsdp="use"))
    for stage in range(2):
        halves = tasks.get(f"bwd_i_{stage}", 0) + tasks.get(f"bwd_w_{stage}", 0)
        assert halves == whole[f"bwd_{stage}"]


@pytest.mark.parametrize("model", [(), ("model",)], ids=["data", "data and model"])
def test_weights_are_gathered_over_the_devices_of_the_batch(model: tuple[str, ...]) -> None:
    """Before the weights are gathered, Shardy shards this loop's activations like the weights,
    so the analysis finds no sum over the batch's devices."""

    def step(params: Any, xs: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            body = jax.checkpoint(lambda h, p: (h + jnp.tanh(h @ p["up"]) @ p["down"], None))
            for p in params:
                x = jaxpp.mark_stage_end(jax.lax.scan(body, x, p)[0])
            return jnp.mean(x**2)

        one = lambda x: jax.value_and_grad(loss)(params, x)  # noqa: E731
        losses, grads = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2))  # losses: one a microbatch
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), losses

    layers = weights(2)["layers"]
    params = [{"up": layers["up"], "down": layers["down"]}] * 2
    xs = jax.random.normal(jax.random.key(1), (MICROBATCHES, ROWS, WIDTH))
    specs = {"up": P(None, "data", *model), "down": P(None, ("data", *model))}
    mesh = mesh_of(2, {"data": 2} | dict.fromkeys(model, 2))
    options = {"in_specs": ([specs] * 2, P(None, "data")), "out_specs": ([specs] * 2, P())}
    run = jaxpp.mpmd_jit_with_loop(step, mesh, fsdp="use", **options)
    assert_equal(run(params, xs), jax.jit(step)(params, xs), 1e-5)
    found = run.compile(params, xs).cost_summary().collectives
    assert {"fwd_0", "fwd_1", "bwd_1"} <= set(gathered(found)), found
    assert loop_tasks(found, "data", *SUMS) == ["fwd_1"]  # the loss of each microbatch
    assert loop_tasks(found, "model", "all-gather") == []


@pytest.mark.parametrize("fsdp", ["use", None])
def test_tensor_parallel_weights_stay_sharded_beside_sequence_parallelism(fsdp: Any) -> None:
    """The scale's gradient is a sum over both axes. The batch is sharded only over "data", and
    the other gradients stay sharded over "model"."""
    constrained = jax.lax.with_sharding_constraint

    def layer(h: Any, p: Any) -> Any:
        h = constrained(h, P("data", "model"))
        norm = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * p["scale"]
        norm = constrained(norm, P("data"))
        return constrained(h + jnp.tanh(norm @ p["up"]) @ p["down"], P("data", "model"))

    def loss(params: Any, x: Any, i: Any, mark: Any) -> Any:
        for p in params:
            x = mark(layer(x, p))
        return jnp.mean(x**2), ()

    layers = row(weights(1)["layers"], 0)
    up, down = jnp.tile(layers["up"], (1, 4)), jnp.tile(layers["down"], (4, 1)) / 4
    params = [{"scale": jnp.ones(WIDTH), "up": up, "down": down}] * 2
    batch = jax.random.normal(jax.random.key(1), (MICROBATCHES, ROWS, LENGTH, WIDTH))
    problem = Problem(loss, params, batch, optax.sgd(0.1))
    specs = [{"scale": P(), "up": P("data", "model"), "down": P("model", "data")}] * 2
    ins, outs = (specs, P(), P(None, "data")), (specs, P(), P(), P())
    mesh = mesh_of(2, {"data": 2, "model": 2})
    found = train(problem, jaxpp.Std1F1B(2), mesh, (ins, outs), fsdp=fsdp)
    over_model = [c for c in found if c.kind == "all-gather" and c.axes == "model"]
    activation = ROWS // 2 * LENGTH * WIDTH * 4
    assert max(c.bytes // c.times for c in over_model) < 2 * activation < up.nbytes
    assert "all-to-all" not in {c.kind for c in found}
    after = [c for c in found if c.task.startswith("after") and "model" in c.axes]
    assert 0 < max(c.bytes for c in after) < 100, after  # the scale and scalars


def fsdp_step(**options: Any) -> tuple[Any, Any]:
    problem = problem_of(unrolled, 2)
    ins, outs = specs_of(problem, {}, fsdp=True)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(2)),
        mesh_of(2, {"data": 2}),
        in_specs=ins,
        out_specs=outs,
        **options,
    )
    return step, (problem.params, problem.optimizer.init(problem.params), problem.batch)


def test_a_rule_says_when_each_weight_is_gathered():
    def when(name: str, struct: jax.ShapeDtypeStruct) -> str | None:
        assert struct.dtype == jnp.float32
        assert struct.ndim in (2, 3)
        return {"up": "step", "down": "use"}.get(name.split("'")[3])

    step, args = fsdp_step(fsdp=when)
    text = step.lower(*args).explain()
    once = next(line for line in text.splitlines() if "once a step, before" in line)
    each = next(line for line in text.splitlines() if "at each use" in line)
    assert "'up'" in once
    assert "'down'" not in once
    assert "'down'" in each
    assert "'b'" not in once + each
    assert "opt_state" not in once + each  # which the loop does not read


def test_the_proof_counts_what_is_kept():
    peaks = {
        when: max(r.peak_bytes for r in step.lower(*args).cost_summary().ranks)
        for when in ("use", "step")
        for step, args in [fsdp_step(fsdp=when)]
    }
    assert peaks["step"] > peaks["use"]


def planned(**options: Any) -> tuple[str, int]:
    """The text of a step's `explain()`, and its peak memory."""
    step, args = fsdp_step(**options)
    lowered = step.lower(*args)
    return lowered.explain(), max(r.peak_bytes for r in lowered.cost_summary().ranks)


@pytest.mark.own_devices  # a limit holds for the ranks of a device together
def test_a_memory_limit_chooses():
    _, needed = planned(fsdp="step")
    text, same = planned(fsdp="step", memory_limit=needed)
    assert same == needed
    assert "once after the loop: result[0], result[1]['head']" in text
    # Partial sums of a gradient are not sharded, so they need the memory of the whole.
    text, less = planned(fsdp="step", memory_limit=needed - 1)
    assert less < needed
    assert "gathered once a step" in text
    assert "the whole weight would exceed the memory limit: result[1]['layers']['b']" in text
    text, least = planned(fsdp="step", memory_limit=less - 1)
    assert least < less
    assert "gathered at each use" in text


@pytest.mark.parametrize("option", ["reduce_once", "fsdp"])
def test_other_values_are_refused(option):
    with pytest.raises(jaxpp.JaxppError, match=f"{option}='often'; expected"):
        fsdp_step(**{option: "often"})
    if option == "fsdp":
        step, args = fsdp_step(fsdp=lambda name, struct: "often")
        with pytest.raises(jaxpp.JaxppError, match="fsdp of params.*expected"):
            step.lower(*args)


def test_what_the_step_constrains_is_reduced_where_it_says():
    problem = problem_of(unrolled, 2)
    of_all = problem.loss

    def loss(p: Any, *rest: Any) -> Any:
        head = jax.lax.with_sharding_constraint(p["head"], P())
        return of_all({**p, "head": head}, *rest)

    problem.loss = loss
    step = assert_trains_equal(
        problem,
        jaxpp.Std1F1B(2),
        mesh_of(2, {"data": 2}),
        in_specs=specs_of(problem, {})[0],
        out_specs=specs_of(problem, {})[1],
    )
    state = problem.optimizer.init(problem.params)
    text = step.compile(problem.params, state, problem.batch).explain()
    line = next(line for line in text.splitlines() if "constrains its sharding" in line)
    assert "['head']" in line
    assert ".py:" in line


def test_zero_gradients_are_not_reduced():
    def step(params: Any, xs: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return jnp.mean((jaxpp.mark_stage_end(x @ params["a"]) @ params["a"]) ** 2)

        def gradient(x: Any) -> Any:
            return jax.grad(loss)(params, x)

        return jaxpp.treduce(gradient, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    params = {"a": jnp.eye(WIDTH), "scalar": jnp.ones(()), "vector": jnp.ones(3)}
    xs = jnp.ones((MICROBATCHES, ROWS, WIDTH))
    specs = (P(), P(None, "data"))
    run = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {"data": 2}), in_specs=specs)
    lines = run.lower(params, xs).explain().splitlines()
    assert "  over data, once after the loop: result['a']" in lines
    assert "  none, because it is zero: result['scalar'], result['vector']" in lines


# --- Gradients in a loop ------------------------------------------------------------------


def _norm(g: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(w * w) for w in jax.tree.leaves(g)))


def each(fun: Any) -> Any:
    return lambda g, p, x: jax.tree.map(fun, g)


def rows_by(x: Any) -> Any:
    return (jnp.abs(x[:, 0]) * 10).astype(jnp.int32) % WIDTH


def negative_counts(x: Any) -> Any:
    """The first devices' terms are less than 0, their sum over all devices is 0."""
    first = jnp.arange(ROWS)[:, None] < ROWS // 2
    counts = [((x < 9) & rows).sum(dtype=jnp.uint32) for rows in (~first, first)]
    return (counts[0] - counts[1]).astype(jnp.float32)


def narrow_counts(x: Any) -> Any:
    """Sums of 80 in eight bits: the first devices' terms are 160, the others' are -80."""
    first = jnp.arange(ROWS)[:, None] < ROWS // 2
    return (jnp.where(first, 80, -40) + (x > 99)).astype(jnp.int8).sum(0, dtype=jnp.int8)


IN_LOOP = {
    "squared": each(lambda g: g * g),
    "product with its transpose": each(lambda g: g @ g.T),
    "divided by itself": each(lambda g: (g + 2) / (g + 2)),
    "positive part": each(lambda g: jnp.where(g > 0, g, 0)),
    "by a mask": each(lambda g: jnp.where(jnp.arange(WIDTH) % 2 == 0, g, 0)),
    "whole numbers": each(lambda g: (1000 * g).astype(jnp.int32)),
    "clipped": lambda g, p, x: jax.tree.map(lambda w: w / jnp.maximum(_norm(g), 1), g),
    "scaled by the batch": lambda g, p, x: jax.tree.map(lambda w: w * jnp.abs(x).mean(), g),
    "with weight decay": lambda g, p, x: jax.tree.map(lambda w, q: w + 0.1 * q, g, p),
    "with a constant": each(lambda g: g + 1),
    "halves, stacked": each(lambda g: jnp.concatenate([g[:2], -g[2:]])),
    "padded": each(lambda g: jnp.pad(g, 1)),
    "padded with ones": each(lambda g: jnp.pad(g, 1, constant_values=1.0)),
    "sorted": each(jnp.sort),
    "summed up": each(lambda g: jnp.cumsum(g, 0)),
    "of another type": each(lambda g: g.astype(jnp.float16).astype(jnp.float32)),
    "twice": lambda g, p, x: (g, jax.tree.map(lambda w: 2 * w.T, g), g),
    "and its norm": lambda g, p, x: (g, _norm(g)),
    "and counts": lambda g, p, x: (g, (x > 0).sum(), (x > 0).any().astype(jnp.int32)),
    "sums of the batch": lambda g, p, x: (g, x.sum(0), jnp.outer(x[:, 0], x[:, 0]).sum()),
    "and a third of a count": lambda g, p, x: (g, jax.lax.div((x > 0).sum(), 3)),
    "and a count that was negative": lambda g, p, x: (g, negative_counts(x)),
    "and a narrow count": lambda g, p, x: (g, narrow_counts(x).astype(jnp.float32)),
    "and products of narrow counts": lambda g, p, x: (
        g,
        jax.lax.dot(narrow_counts(x), jnp.ones(WIDTH, "i1"), preferred_element_type="i4"),
    ),
    "centred": each(lambda g: g - g.mean(0, keepdims=True)),
    "tiled": each(lambda g: jnp.tile(g, (2, 1))),
    "rows times rows": each(lambda g: g[0][:, None] * jnp.arange(3.0)),
    "rows by the batch": lambda g, p, x: jax.tree.map(lambda w: w[rows_by(x)], g),
    "rows by a weight": lambda g, p, x: jax.tree.map(lambda w: w[rows_by(p["a"].T)], g),
    "rows of the batch, added": lambda g, p, x: jax.tree.map(
        lambda w: w.at[rows_by(x)].add(x), g
    ),
    "turned": each(lambda g: jax.lax.complex(g, 2 * g) * (1 + 2j)),
    "turned by a loop": each(
        lambda g: jax.lax.fori_loop(0, 3, lambda i, c: c * 1j + g, jnp.zeros_like(g, "c8"))
    ),
    "by a loop": each(lambda g: jax.lax.fori_loop(0, 3, lambda i, c: 0.5 * c + g, g)),
    "by a loop of its own": each(
        lambda g: jax.lax.scan(lambda c, w: (c + w, 2 * w), jnp.zeros(WIDTH), g)[1]
    ),
    "by a call": each(jax.jit(lambda g: 0.5 * g + g.T)),
    "by a call in a loop": each(
        lambda g: jax.lax.fori_loop(0, 3, lambda i, c: jax.jit(jnp.add)(0.5 * c, g), g)
    ),
    "by a branch": each(
        lambda g: jax.lax.cond(jnp.sum(g) > 0, lambda w: 2 * w, lambda w: -w, g)
    ),
    "by a branch of the step": lambda g, p, x: jax.tree.map(
        lambda w: jax.lax.cond(p["a"].sum() > 0, lambda w: 2 * w, lambda w: w.T, w), g
    ),
    "by a loop that looks": each(
        lambda g: jax.lax.while_loop(
            lambda c: jnp.sum(c) < 100, lambda c: 2 * jnp.abs(c) + 1, g
        )
    ),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("axes", ({"data": 2}, {"data": 2, "model": 2}), ids=str)
@pytest.mark.parametrize("what", IN_LOOP)
def test_what_a_loop_does_with_gradients(what, axes):
    keys = jax.random.split(jax.random.key(0), 3)
    p = {
        name: jax.random.normal(k, (WIDTH, WIDTH)) for name, k in zip("ab", keys, strict=False)
    }
    xs = jax.random.normal(keys[2], (MICROBATCHES, ROWS, WIDTH))

    def loss(p: Any, x: Any, mark: Any) -> Any:
        return jnp.mean((mark(jnp.tanh(x @ p["a"])) @ p["b"]) ** 2)

    def one(p: Any, x: Any, mark: Any) -> Any:
        return IN_LOOP[what](jax.grad(loss)(p, x, mark), p, x)

    def step(p: Any, xs: Any) -> Any:
        def of_microbatch(x: Any) -> Any:
            return one(p, x, jaxpp.mark_stage_end)

        return jaxpp.treduce(of_microbatch, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    of_weights = {"a": P(None, "model"), "b": P("model")} if "model" in axes else P()
    ours = jaxpp.mpmd_jit_with_loop(
        step, mesh_of(2, axes), in_specs=(of_weights, P(None, "data"))
    )(p, xs)
    each_alone = [jax.jit(lambda x: one(p, x, lambda y: y))(x) for x in xs]
    plain = jax.tree.map(lambda *values: sum(values), *each_alone)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        tolerance = len(xs) if what == "whole numbers" else 1e-4 * np.abs(b).max()
        tolerance *= 10 if what == "of another type" else 1
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=tolerance)


AFTER_LOOP = {
    "the sum and both": lambda g, h: (g + h, jnp.tanh(g), h * h),
    "the sum and the first": lambda g, h: (g + h, jnp.sum(g * g)),
    "the sum and the second": lambda g, h: (g + h, jnp.sum(h * h)),
    "more sums": lambda g, h: (g + h) + g,
    "a sum and a branch": lambda g, h: jax.lax.cond(g[0, 0] > 0, lambda: g + h, lambda: h),
}


@pytest.mark.parametrize("what", AFTER_LOOP)
def test_what_a_step_does_with_two_gradients(what):
    p = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
    xs = jax.random.normal(jax.random.key(1), (MICROBATCHES, ROWS, WIDTH))

    def step(p: Any, xs: Any) -> Any:
        def one(x: Any) -> Any:
            g = jax.grad(lambda p: jnp.mean(jaxpp.mark_stage_end(jnp.tanh(x @ p)) ** 2))(p)
            return g, 3 * g

        sums = jaxpp.treduce(one, xs, jaxpp.Std1F1B(1), operation=jaxpp.Add)
        return AFTER_LOOP[what](*sums)

    run = jaxpp.mpmd_jit_with_loop(
        step, mesh_of(1, {"data": 2}), in_specs=(P(), P(None, "data"))
    )
    assert_equal(run(p, xs), jax.jit(step)(p, xs), 1e-4)


def table_of_two(p: Any, x: Any) -> Any:
    rows = (jnp.abs(x[..., 0]) * 10).astype(jnp.int32) % (2 * WIDTH)
    return x + jnp.concatenate([p["a"], p["c"]])[rows]


def kernel_of_two(p: Any, x: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, jnp.stack([p["a"], p["c"]]), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def learned_positions(p: Any, x: Any) -> Any:
    return x + p["a"][jnp.arange(6)]


def depthwise(p: Any, x: Any) -> Any:
    kernel = p["a"][:3, None]
    form = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=form, feature_group_count=WIDTH
    )


def complex_weights(p: Any, x: Any) -> Any:
    return jnp.real(x.astype("complex64") @ jax.lax.complex(p["a"], p["c"]))


def long_convolution(p: Any, x: Any) -> Any:
    of_x, of_kernel = jnp.fft.rfft(x, n=12, axis=1), jnp.fft.rfft(p["a"][:6], n=12, axis=0)
    return x + jnp.fft.irfft(of_x * of_kernel, n=12, axis=1)[:, :6]


ONCE = [table_of_two, kernel_of_two, learned_positions, depthwise, complex_weights]
ONCE += [long_convolution]


@pytest.mark.parametrize("stage", ONCE)
def test_what_is_reduced_once(stage):
    keys = jax.random.split(jax.random.key(0), 4)
    p = {n: jax.random.normal(k, (WIDTH, WIDTH)) for n, k in zip("abc", keys, strict=False)}
    xs = jax.random.normal(keys[3], (MICROBATCHES, ROWS, 6, WIDTH))

    def step(p: Any, xs: Any) -> Any:
        def loss(p: Any, x: Any) -> Any:
            hidden = jaxpp.mark_stage_end(jnp.tanh(stage(p, x)))
            mean = jnp.mean((hidden @ p["b"]) ** 2)
            return mean, {"loss": mean}

        one = lambda x: jax.value_and_grad(loss, has_aux=True)(p, x)  # noqa: E731
        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    specs = (P(), P(None, "data"))
    run = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {"data": 2}), in_specs=specs)
    assert_equal(run(p, xs), jax.jit(step)(p, xs), 1e-4)
    found = run.compile(p, xs).cost_summary().collectives
    assert loop_tasks(found, "data", *SUMS) == []


def test_sums_of_constrained_values() -> None:
    """Both operands of each weight's gradient are results of constraints."""
    keys = jax.random.split(jax.random.key(0), 3)
    p = {n: jax.random.normal(k, (WIDTH, WIDTH)) for n, k in zip("ab", keys, strict=False)}
    xs = jax.random.normal(keys[2], (MICROBATCHES, ROWS, WIDTH))

    def step(p: Any, xs: Any, sharded: Any) -> Any:
        def loss(p: Any, x: Any) -> Any:
            hidden = sharded(jaxpp.mark_stage_end(jnp.tanh(sharded(sharded(x) @ p["a"]))))
            return jnp.mean(sharded(hidden @ p["b"]) ** 2)

        one = lambda x: jax.grad(loss)(p, x)  # noqa: E731
        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    def by_rows(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, P("data"))

    run = jaxpp.mpmd_jit_with_loop(
        lambda p, xs: step(p, xs, by_rows), mesh_of(2, {"data": 2}), in_specs=P()
    )
    assert_equal(run(p, xs), jax.jit(lambda p, xs: step(p, xs, lambda x: x))(p, xs), 1e-4)
    found = run.compile(p, xs).cost_summary().collectives
    assert loop_tasks(found, "data", *SUMS) == []

"""Programs written by hand, with equivalents in plain JAX: a training step and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from equality import some_devices
from jaxpp.experimental import mpmd
from trainings import described

WIDTH = 8


def hand_mesh(ranks: int, data: int = 1, explicit: bool = False) -> mpmd.MpmdMesh:
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
    devices = np.array(some_devices(ranks * data)).reshape(ranks, data)
    return mpmd.MpmdMesh(Mesh(devices, ("stage", "data"), axis_types=types), "stage")


def on(mesh: mpmd.MpmdMesh, ranks: int | list[int], *spec: Any) -> NamedSharding:
    whole = mesh.unstack[ranks] if isinstance(ranks, int) else mesh.mpmd_submesh(ranks).jax_mesh
    return NamedSharding(whole, P(*spec))


# --- A training step ----------------------------------------------------------------------


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def loss_of(w: Any, h: Any, y: Any) -> Any:
    return jnp.mean((layer(w, h) - y) ** 2)


def training(mesh: mpmd.MpmdMesh, microbatches: int, **options: Any) -> mpmd.MpmdFunction:
    """A step of (ws, xs, ys) on two ranks, with rows sharded over "data"; it returns the losses
    and the new weights."""
    w0, w1 = (on(mesh, rank) for rank in (0, 1))
    b0, b1 = (on(mesh, rank, "data") for rank in (0, 1))
    shardings = ((w0, w1), b0, b1)

    @mpmd.mpmd(mesh, in_shardings=shardings, infer_donation=True, **options)
    def step(ws: Any, xs: Any, ys: Any) -> Any:
        forward = mpmd.task(layer, name="fwd0", out_shardings=b0)
        both = mpmd.task(
            jax.value_and_grad(loss_of, argnums=(0, 1)),
            name="fwd1_bwd1",
            out_shardings=(P(), (P(), P("data"))),
        )

        @mpmd.task(out_shardings=w0)
        def bwd0(w: Any, x: Any, dh: Any) -> Any:
            return jax.vjp(layer, w, x)[1](dh)[0]

        add = mpmd.task(jnp.add, name="add", out_shardings=P())
        sent = [mpmd.transfer(forward(ws[0], x), out_shardings=b1) for x in xs]
        losses, back, total1 = [], [], None
        for future, y in zip(sent, ys, strict=True):
            loss, (d1, dh) = both(ws[1], future.done(), y)
            losses.append(loss)
            back.append(mpmd.transfer(dh, out_shardings=b0))
            total1 = d1 if total1 is None else add(total1, d1)
        total0 = None
        for future, x in zip(back, xs, strict=True):
            d0 = bwd0(ws[0], x, future.done())
            total0 = d0 if total0 is None else add(total0, d0)
        update = mpmd.task(lambda w, d: w - 0.1 * d, name="update", out_shardings=P())
        return losses, (update(ws[0], total0), update(ws[1], total1))

    return step


def batch(microbatches: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    ws = (array(WIDTH, WIDTH), array(WIDTH, WIDTH))
    xs, ys = ([array(4, WIDTH) for _ in range(microbatches)] for _ in range(2))
    return ws, xs, ys


@jax.jit
def plain_training(ws: Any, xs: Any, ys: Any) -> Any:
    def loss(ws: Any, x: Any, y: Any) -> Any:
        return loss_of(ws[1], layer(ws[0], x), y)

    found = [jax.value_and_grad(loss)(ws, x, y) for x, y in zip(xs, ys, strict=True)]
    losses, grads = zip(*found, strict=True)
    total = jax.tree.map(lambda *parts: sum(parts), *grads)
    return list(losses), jax.tree.map(lambda w, d: w - 0.1 * d, ws, total)


def trained(mesh: mpmd.MpmdMesh) -> Iterator[str]:
    """Lines with what this process holds after two steps, and with its results of a program
    whose values are on several ranks."""
    step = training(mesh, 3)
    ws, xs, ys = batch(3)
    for _ in range(2):
        losses, ws = step(ws, xs, ys)
    yield from described("training", (losses, ws))
    both = on(mesh, [0, 1], mesh.mpmd_axis_name)

    @mpmd.mpmd(mesh, in_shardings=(both, on(mesh, 1)))
    def program(a: Any, b: Any) -> Any:
        total = mpmd.task(lambda a: a.sum(0), out_shardings=on(mesh, [0, 1]))(a)
        return total, mpmd.transfer(b, out_shardings=on(mesh, 0)).done()

    yield from described("parted", program(xs[0], ys[0]))
    lowered = program.lower(xs[0], ys[0])
    used = zip((xs[0], ys[0]), lowered.used_inputs, strict=True)
    yield from described("local", lowered.eval_local(*(x for x, u in used if u)))


# --- Random programs ----------------------------------------------------------------------

_OPS: list[Callable[..., Any]] = [
    lambda *xs: sum(xs),
    lambda *xs: jnp.tanh(xs[0]) * xs[-1],
    lambda *xs: (xs[0] @ xs[-1].T, xs[0] + 1)[1],
    lambda *xs: jnp.sort(xs[-1], axis=0),
    lambda *xs: xs[0].astype(jnp.bfloat16).astype(jnp.float32),
]


class RandomProgram:
    """A random program of tasks, transfers, stacks and slices on values with 4 rows; `plain`
    computes the same."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.random, self.ranks, self.seed = random.Random(seed), ranks, seed
        self.args = [self.random.randrange(ranks) for _ in range(self.random.randint(2, 5))]
        self.sharded = [self.random.random() < 0.5 for _ in self.args]

    def arguments(self) -> list[Any]:
        rng = np.random.default_rng(self.seed)
        return [rng.normal(size=(4, 4)).astype(np.float32) for _ in self.args]

    def _run(self, arrays: list[Any], machine: Any) -> list[Any]:
        choose = random.Random(self.seed)
        values = list(zip(arrays, self.args, strict=True))
        for _ in range(choose.randint(4, 20)):
            kind = choose.random()
            if kind < 0.6:
                rank = choose.choice(values)[1]
                here = [v for v, r in values if r == rank]
                args = [choose.choice(here) for _ in range(choose.randint(1, 3))]
                fun = choose.choice(_OPS)
                values.append((machine.task(fun, rank, choose.random() < 0.5, args), rank))
            elif kind < 0.9 and self.ranks > 1:
                value, rank = choose.choice(values)
                to = choose.choice([r for r in range(self.ranks) if r != rank])
                values.append((machine.transfer(value, to, choose.random() < 0.5), to))
            else:
                of = dict((r, v) for v, r in values)
                chosen = sorted(choose.sample(sorted(of), choose.randint(1, len(of))))
                total = machine.sum_over([of[r] for r in chosen], chosen)
                values.append((total[0], chosen[0]))
        return [v for v, _ in values[-6:]]

    def plain(self) -> list[Any]:
        return self._run(self.arguments(), _Plain())

    def written(self, mesh: mpmd.MpmdMesh) -> Any:
        pairs = zip(self.args, self.sharded, strict=True)
        shardings = [on(mesh, r, *(["data"] if s else [])) for r, s in pairs]

        @mpmd.mpmd(mesh, in_shardings=(shardings,))
        def program(arrays: Any) -> Any:
            return self._run(arrays, _Written(mesh))

        return program(self.arguments())


class _Plain:
    def task(self, fun: Any, rank: int, sharded: bool, args: list[Any]) -> Any:
        return fun(*args)

    def transfer(self, value: Any, to: int, sharded: bool) -> Any:
        return value

    def sum_over(self, values: list[Any], ranks: list[int]) -> list[Any]:
        whole = sum(jnp.tile(v, (1, 1)) for v in values) * 1.0
        return [whole for _ in ranks]


class _Written:
    def __init__(self, mesh: mpmd.MpmdMesh) -> None:
        self.mesh = mesh
        self.explicit = AxisType.Explicit in mesh.jax_mesh.axis_types

    def _spec(self, sharded: bool) -> list[str]:
        return ["data"] if sharded else []

    def task(self, fun: Any, rank: int, sharded: bool, args: list[Any]) -> Any:
        def run(*xs: Any) -> Any:
            return fun(*(jax.reshard(x, P()) for x in xs)) if self.explicit else fun(*xs)

        return mpmd.task(run, out_shardings=on(self.mesh, rank, *self._spec(sharded)))(*args)

    def transfer(self, value: Any, to: int, sharded: bool) -> Any:
        sharding = on(self.mesh, to, *self._spec(sharded))
        return mpmd.transfer(value, out_shardings=sharding).done()

    def sum_over(self, values: list[Any], ranks: list[int]) -> list[Any]:
        """Gives each rank the sum of the ranks' values."""
        whole = [
            self.task(lambda x: x[None], r, False, [v])
            for v, r in zip(values, ranks, strict=True)
        ]
        if len(ranks) == 1:
            return [self.task(lambda x: x[0], ranks[0], False, whole)]
        stacked = mpmd.stack(*whole)
        total = mpmd.task(lambda x: x.sum(0), out_shardings=on(self.mesh, ranks))(stacked)
        return list(mpmd.slice(total, ranks))

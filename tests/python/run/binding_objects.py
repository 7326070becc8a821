"""Objects of `jaxpp._core` for the tests of the binding: graphs, and the objects of a step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp.api as jaxpp
from jaxpp import _core
from jaxpp.client.devices import devices_for
from jaxpp.jax_internals.client import serialized_compile_options
from jaxpp.lower.lowering import TaskLowerer


def built_graph() -> _core.Graph:
    graph = _core.Graph("g", 1)
    value = graph.add_arg(("float32", [2]), False, "x")
    graph.add_output(value, "y", value)
    graph.finish()
    return graph


def in_loop() -> _core.Graph:
    graph = _core.Graph("g", 1)
    graph.add_arg(("float32", [2]), False, "x")
    graph.begin_loop(1, 1, None, None)
    return graph


def with_output() -> _core.Graph:
    graph = _core.Graph("g", 1)
    graph.add_output(graph.add_arg(("float32", [2]), False, "x"), "x", _core.NONE)
    return graph


class Step:
    """A small step and the objects of which it consists."""

    def __init__(self) -> None:
        devices = np.array(jax.devices()[:2])
        mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage")

        def step(w: Any, xs: Any) -> Any:
            def loss(w: Any, x: Any) -> Any:
                x = jaxpp.mark_stage_end(jnp.tanh(x @ w[0]))
                return jnp.sum(jaxpp.mark_stage_end(x @ w[1]))

            one = lambda x: jax.grad(loss)(w, x)  # noqa: E731
            return jaxpp.treduce(one, xs, schedule=jaxpp.Std1F1B(2), operation=jaxpp.Add)

        self.args = ([jnp.ones((2, 2))] * 2, jnp.ones((2, 2, 2)))
        function = jaxpp.mpmd_jit_with_loop(step, mesh)
        self.compiled = function.compile(*self.args).compiled
        self.compiled.set_tracing()
        jax.block_until_ready(self.compiled.run_leaves(jax.tree.leaves(self.args)))
        self.trace = self.compiled.trace_json()
        self.compiled.set_tracing(False)
        self.traced = self.compiled._traced
        self.plan, self.staged = self.traced.plan, self.traced.staged
        self.graph = self.traced.graph.core
        self.schedules = self.traced.schedules
        self.devices = devices_for(mesh, None)
        self.client = self.devices.client
        self.flat_devices = [d for row in self.devices.indices for d in row]
        self.folder = tempfile.mkdtemp()
        self.saved = self.folder + "/saved"
        self.compiled.save(self.saved)
        specs = self.traced.specs
        self.lowerer = TaskLowerer(self.traced.graph, self.staged, mesh, specs, "cpu")

    def executables(self, kept: Any) -> list[Any]:
        options = serialized_compile_options(1, None)
        rows = zip(self.staged.tasks(), self.plan.donations(), strict=True)
        lowered = [self.lowerer.lower(t, row) if t.ops else None for t, row in rows]
        compile_ = self.client.compile
        return [
            None if one is None else compile_(one.code, options, [], kept, b"", b"").executable
            for one in lowered
        ]

    def runtime(
        self, executables: list[Any], shard_dims: list[Any] | None = None
    ) -> _core.Runtime:
        return _core.Runtime(
            self.client,
            self.plan,
            1,
            self.flat_devices,
            executables,
            [None] * len(executables) if shard_dims is None else shard_dims,
            True,
            0,
            None,
            None,
        )

    def values(self) -> list[_core.Value]:
        leaves = jax.tree.leaves(self.args)
        return self.compiled._values_of(leaves, []) + self.compiled._constants


def plan_measured(step: Step, measure: Callable[[_core.Staged], Any]) -> _core.Plan:
    return _core.Plan(step.graph, step.schedules, None, measure)


def failed_staged(step: Step) -> _core.Staged:
    """A Staged that was passed to `measure` by a planning that then failed."""
    seen: list[_core.Staged] = []
    try:
        plan_measured(step, lambda staged: seen.append(staged) or [1])
    except ValueError:
        pass
    return seen[0]


def value_of(client: _core.Client) -> _core.Value:
    return _core.Value.put(client, [0], 1, [0], [np.ones(2, "f4")], "float32", "device")

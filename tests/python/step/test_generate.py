"""The example that generates text continues prompts as plain JAX does."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np
import pytest

import jaxpp.api as jaxpp
from equality import mesh_of
from locations import ROOT


def test_generated_text_is_that_of_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("generate")

    def batch_by_batch(params: Any, cache: Any, tokens: Any, start: Any) -> Any:
        def one(own: Any, new: Any) -> Any:
            return example.next_tokens(params, own, new, start, lambda x: x)

        found, cache = jax.vmap(one)(cache, tokens)
        return found[..., None], cache

    mesh = mesh_of(example.STAGES, {})
    run = jaxpp.mpmd_jit_with_loop(example.step, mpmd_mesh=mesh, donate_argnums=1)
    shape = (example.BATCHES, example.SIZE, 4)
    prompts = jax.random.randint(jax.random.key(1), shape, 0, example.VOCAB)
    params = example.init(jax.random.key(0))
    found = example.generate(run, params, prompts, 12)
    expected = example.generate(jax.jit(batch_by_batch), params, prompts, 12)
    np.testing.assert_array_equal(found, expected)
    _, cache = run(params, example.empty_cache(), prompts, 0)
    ranks = [layer["k"].mpmd_idxs for layer in cache]
    layers = example.LAYERS // example.STAGES
    assert ranks == [(k // layers,) for k in range(example.LAYERS)]

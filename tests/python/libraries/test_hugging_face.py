"""Hugging Face's Flax models, as listed in docs/compatibility.md."""

from __future__ import annotations

import importlib
from typing import Any

import flax.linen as nn
import jax
import optax
import pytest
from flax.training.train_state import TrainState

import jaxpp.api as jaxpp
from libraries import SGD, STAGES, Loop, assert_same_training, make_batch, random_tree


def hugging_face() -> Any:
    """A release of transformers with Flax models, if installed; it is too large to require."""
    why = "no transformers with Flax models: pip install 'transformers<5'"
    transformers = pytest.importorskip("transformers", reason=why)
    if not hasattr(transformers, "FlaxGPT2LMHeadModel"):
        pytest.skip(why)
    return transformers


def marked_blocks(kind: type) -> Any:
    """In this context, each block of the model ends a stage, without changes to its code."""

    def mark(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = call(*args, **kwargs)
        if isinstance(context.module, kind) and context.method_name == "__call__":
            return (jaxpp.mark_stage_end(out[0]), *out[1:])
        return out

    return nn.intercept_methods(mark)


def check_hugging_face(model: Any, kind: type) -> None:
    params = random_tree(nn.unbox(model.params_shape_tree))
    state = TrainState.create(apply_fn=model, params=params, tx=SGD)

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any, microbatch: Any) -> Any:
            with marked_blocks(kind):
                logits = model(microbatch["x"], params=params).logits
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["x"])
            return losses.mean()

        def one(microbatch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, microbatch)
            return grads, loss

        grads, losses = loop(one, batch)
        return state.apply_gradients(grads=grads), losses

    # Softmax cancels the bias of keys, so the gradient of that bias is only rounding error.
    assert_same_training(step, state, make_batch(vocabulary=16), tolerance=1e-3)


@pytest.mark.soak
def test_hugging_face_gpt2() -> None:
    transformers = hugging_face()
    config = transformers.GPT2Config(
        n_layer=STAGES, n_embd=8, n_head=2, n_positions=8, vocab_size=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    module = importlib.import_module("transformers.models.gpt2.modeling_flax_gpt2")
    model = transformers.FlaxGPT2LMHeadModel(config, input_shape=(1, 6), _do_init=False)
    check_hugging_face(model, module.FlaxGPT2Block)


@pytest.mark.soak
def test_hugging_face_bert() -> None:
    transformers = hugging_face()
    config = transformers.BertConfig(
        num_hidden_layers=STAGES, hidden_size=8, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, vocab_size=16,
    )  # fmt: skip
    module = importlib.import_module("transformers.models.bert.modeling_flax_bert")
    model = transformers.FlaxBertForMaskedLM(config, input_shape=(1, 6), _do_init=False)
    check_hugging_face(model, module.FlaxBertLayer)

"""Trains a model of MaxText as a pipeline, as docs/compatibility.md describes."""

import functools
import os
import sys
from unittest.mock import patch

sys.path.pop(0)  # this folder, in which "maxtext" is this file
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from maxtext.layers.nnx_decoders import NNXDecoder as Decoder
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, train_utils

import jaxpp.api as jaxpp
import jaxpp.orbax

logging.set_verbosity(logging.INFO)  # MaxText logs the losses
if "JAX_COORDINATOR_ADDRESS" in os.environ:
    jax.distributed.initialize()
    jaxpp.orbax.register()
keys = dict(argument.split("=", 1) for argument in sys.argv[2:])
ranks = int(keys.pop("ici_pipeline_parallelism", 1))
stages = ranks * int(keys.pop("num_pipeline_repeats", 1))
groups = np.split(np.array(jax.devices()), ranks)
keys |= {"internal_compile": "True", "internal_compile_num_devices": str(len(groups[0]))}
config, recorder = train.initialize([*sys.argv[:2], *map("=".join, keys.items())])
meshes = [maxtext_utils.get_mesh_from_config(config, group) for group in groups]
devices = np.concatenate([m.devices for m in meshes], meshes[0].axis_names.index("stage"))
mesh = jaxpp.MpmdMesh(meshes[0].update(devices=devices), "stage")
own_mesh = meshes[jax.process_index() * ranks // jax.process_count()]
schedule = jaxpp.Interleaved1F1B(stages, ranks) if stages > ranks else jaxpp.Std1F1B(ranks)
plain_scan = jax.lax.scan
apply_scanned, init_layers = Decoder._apply_layers_sequentially, Decoder._init_sequential_layers


def apply_in_stages(decoder, layers, *args, length, **kwargs):
    stack = getattr(decoder, "moe_layers", layers)  # DeepSeek's dense layers are in stage 0
    ends = [n for n in range(1, length) if layers is stack and n * stages % length < stages]

    @patch.object(jax.lax, "scan", plain_scan)
    def scan(body, y, rows, **options):
        outs = []
        for a, b in zip([0, *ends], [*ends, length], strict=True):
            part = jax.tree.map(lambda x, a=a, b=b: x[a:b], rows)
            y, out = plain_scan(body, y, part, **options)
            y, outs = jaxpp.mark_stage_end(y) if b < length else y, [*outs, out]
        return y, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)

    with patch.object(jax.lax, "scan", scan):
        return apply_scanned(decoder, layers, *args, length=length, **kwargs)


@functools.cache
def ending_stage(layer):  # a class of layers after which a stage ends
    def call(self, *args, **kwargs):
        result = layer.__call__(self, *args, **kwargs)
        result, sown = jaxpp.mark_stage_end((result, nnx.state(self, nnx.Intermediate)))
        nnx.update(self, sown)
        return result

    return type(layer.__name__, (layer,), {"__call__": call})


def init_in_stages(decoder, *args):
    init_layers(decoder, *args)
    for n, layer in enumerate((layers := decoder.get_layers())[:-1], 1):
        if n * stages % len(layers) < stages:
            layer.__class__ = ending_stage(type(layer))


Decoder._apply_layers_sequentially = apply_in_stages
Decoder._init_sequential_layers = init_in_stages
maxtext_utils.get_mesh_from_config = lambda *_: own_mesh
metrics = jaxpp.MpmdSharding(mesh, range(ranks), jax.sharding.PartitionSpec())
jit = lambda step, out_shardings, **options: jaxpp.mpmd_jit_with_loop(  # noqa: E731
    step, mesh, out_shardings=(out_shardings[0], metrics), schedule=schedule, **options
)
train_utils.jit_train_step = patch.object(jax, "jit", jit)(train_utils.jit_train_step)
train.run(config, recorder)

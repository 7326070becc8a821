"""Trains a tiny Mixtral as a pipeline: a Llama whose layers have experts, two per token.

    python examples/mixtral.py --experts=4 --train-steps=20

Every device has a part of each expert (--tp); `moe.py` places whole experts on separate
devices. The same steps then run without a pipeline, and the losses are compared. They
include the routers' loss, which passes from stage to stage beside the activations.
"""

from __future__ import annotations

import decoder


def add_experts(parser):
    parser.add_argument("--experts", type=int, default=4, help="experts a layer")


if __name__ == "__main__":
    decoder.main(__doc__, add_flags=add_experts)

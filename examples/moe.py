"""Trains a mixture of experts whose experts are divided among the devices of a stage.

    python examples/moe.py --routing=top2 --experts=4 --ep=2
    python examples/moe.py --routing=dropless --experts=4 --ep=2

Stages are pipeline-parallel, and the devices inside each stage expert-parallel: they
share the sequences of a microbatch as in data parallelism, and each device holds a part
of the experts, to which tokens of all devices go. `decoder.py` has both ways to route.
The same steps then run without a pipeline, and the losses are compared.
"""

from __future__ import annotations

import decoder


def add_experts(parser):
    parser.add_argument("--routing", choices=("top2", "dropless"), default="top2")
    parser.add_argument("--experts", type=int, default=4, help="experts a layer")
    parser.add_argument("--capacity", type=float, default=1.25,
                        help="top2: places of an expert, times its even share")  # fmt: skip


if __name__ == "__main__":
    decoder.main(__doc__, decoder.EXPERT, decoder.EXPERT_RULES, add_experts)

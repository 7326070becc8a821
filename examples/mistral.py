"""Trains a tiny Mistral as a pipeline: a Llama whose tokens see a window of those before.

    python examples/mistral.py --window=16 --train-steps=20

Through the layers a token still hears of all that went before (`decoder.py`). The same steps
are then done without a pipeline, and the losses compared.
"""

from __future__ import annotations

import decoder


def add_window(parser):
    parser.add_argument("--window", type=int, default=16, help="positions that a token sees")


if __name__ == "__main__":
    decoder.main(__doc__, add_flags=add_window)

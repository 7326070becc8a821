"""Trains a tiny Mistral as a pipeline: a Llama whose attention has a sliding window.

    python examples/mistral.py --window=16 --train-steps=20

Through the layers, a token still depends on all preceding ones (`decoder.py`). The same
steps then run without a pipeline, and the losses are compared.
"""

from __future__ import annotations

import decoder


def add_window(parser):
    parser.add_argument("--window", type=int, default=16, help="positions that a token sees")


if __name__ == "__main__":
    decoder.main(__doc__, add_flags=add_window)

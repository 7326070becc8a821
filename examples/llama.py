"""Trains a tiny Llama as a pipeline with tensor and data parallelism inside a stage.

    python examples/llama.py --pp=2 --dp=2 --tp=2 --train-steps=20

RMSNorm, rotary positions, grouped-query attention and SwiGLU (`decoder.py`). The same
steps then run without a pipeline, and the losses are compared.
"""

from __future__ import annotations

import decoder

if __name__ == "__main__":
    decoder.main(__doc__)

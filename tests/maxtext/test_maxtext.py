"""examples/maxtext.py trains MaxText's models as MaxText's own trainer does.

Both run in processes of their own, on the same devices for a rank, and write their metrics.
`make maxtext` installs MaxText and runs these tests; `make test` does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 10

COMMON = [
    *("run_name=test", "hardware=cpu", "skip_jax_distributed_system=True", "log_config=False"),
    *("dataset_type=synthetic", "max_target_length=16", "per_device_batch_size=2"),
    *("gradient_accumulation_steps=4", f"learning_rate_schedule_steps={STEPS}"),
    *("attention=dot_product", "dtype=float32", "enable_tensorboard=False"),
    *("enable_goodput_recording=False", "monitor_goodput=False", "checkpoint_period=5"),
    *("override_model_config=True", "vocab_size=128", "base_emb_dim=32", "base_mlp_dim=64"),
    *("base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8"),
]
LLAMA = ["decoder_block=llama2", "base_num_decoder_layers=4"]
DROPOUT = ["dropout_rate=0.1", "enable_dropout=True"]
DEEPSEEK = [
    *("model_name=deepseek3-tiny", "base_num_decoder_layers=4", "first_num_dense_layers=1"),
    *("base_num_kv_heads=4", "base_moe_mlp_dim=32", "num_experts=4", "num_experts_per_tok=2"),
    *("q_lora_rank=16", "kv_lora_rank=8", "qk_nope_head_dim=8", "qk_rope_head_dim=8"),
    *("v_head_dim=8", "sparse_matmul=False", "megablox=False", "routed_bias_update_rate=0.01"),
]
GEMMA = ["model_name=gemma3-4b", "base_num_decoder_layers=14", "sliding_window_size=8"]


def train(folder: pathlib.Path, devices: int, script: list[str], *keys: str) -> list[float]:
    """The losses of the steps that the script trains with this many devices per process."""
    spec = importlib.util.find_spec("maxtext")
    assert spec and spec.origin
    config = pathlib.Path(spec.origin).parent / "configs" / "base.yml"
    metrics = folder / "metrics"
    metrics.unlink(missing_ok=True)
    given = dict(key.split("=", 1) for key in [*COMMON, "enable_checkpointing=False", *keys])
    given |= {"base_output_directory": str(folder), "metrics_file": str(metrics)}
    done = subprocess.run(
        [*script, config, *map("=".join, given.items())],
        env={
            **os.environ,
            "DECOUPLE_GCLOUD": "TRUE",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["learning/loss"] for line in lines]


def train_plain(folder: pathlib.Path, devices: int, *keys: str) -> list[float]:
    script = [sys.executable, "-m", "maxtext.trainers.pre_train.train"]
    return train(folder, devices, script, *keys)


def train_pipelined(folder: pathlib.Path, ranks: int, devices: int, *keys: str) -> list[float]:
    script = [sys.executable, str(ROOT / "examples" / "maxtext.py")]
    return train(folder, ranks * devices, script, f"ici_pipeline_parallelism={ranks}", *keys)


@pytest.mark.parametrize(
    ("ranks", "devices", "keys", "repeats"),
    [
        pytest.param(2, 1, LLAMA, 1, id="scanned"),
        pytest.param(2, 1, [*LLAMA, "scan_layers=False"], 1, id="unscanned"),
        pytest.param(2, 1, [*LLAMA, *DROPOUT], 1, id="dropout"),
        pytest.param(2, 1, [*LLAMA, *DROPOUT, "scan_layers=False"], 1, id="dropout, unscanned"),
        pytest.param(4, 1, LLAMA, 1, id="four ranks"),
        pytest.param(2, 1, LLAMA, 2, id="two stages a rank"),
        pytest.param(2, 2, [*LLAMA, "ici_fsdp_parallelism=2"], 1, id="fsdp"),
        pytest.param(
            *(2, 2, [*LLAMA, "ici_fsdp_parallelism=2", "shard_mode=explicit"], 1),
            id="explicit axes",
        ),
        pytest.param(
            *(2, 2, [*LLAMA, "ici_fsdp_parallelism=1", "ici_tensor_parallelism=2"], 1),
            id="tensor",
        ),
        pytest.param(2, 1, DEEPSEEK, 1, id="deepseek"),
        pytest.param(2, 1, [*DEEPSEEK, "scan_layers=False"], 1, id="deepseek unscanned"),
        pytest.param(2, 1, GEMMA, 1, id="gemma"),
    ],
)
def test_trains_as_maxtext_does(
    ranks: int, devices: int, keys: list[str], repeats: int, tmp_path: pathlib.Path
) -> None:
    keys = [*keys, f"steps={STEPS}"]
    plain = train_plain(tmp_path, devices, *keys)
    stages = [f"num_pipeline_repeats={repeats}"]
    pipelined = train_pipelined(tmp_path, ranks, devices, *keys, *stages)
    assert len(plain) == STEPS and plain[-1] < plain[0]
    assert pipelined == pytest.approx(plain, rel=5e-7)


def test_resumes_from_its_checkpoint(tmp_path: pathlib.Path) -> None:
    straight = train_pipelined(tmp_path, 2, 1, *LLAMA, f"steps={STEPS}")
    keys = [*LLAMA, "enable_checkpointing=True", "async_checkpointing=False"]
    first = train_pipelined(tmp_path, 2, 1, *keys, "steps=6")
    rest = train_pipelined(tmp_path, 2, 1, *keys, f"steps={STEPS}")
    assert [*first, *rest] == straight


def train_launched(folder: pathlib.Path, *keys: str) -> list[float]:
    """The losses of two ranks in a process each, as the first process writes them."""
    script = folder / "train"
    script.write_text(
        f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || set -- "$@" metrics_file={folder / "others"}\n'
        f'exec {sys.executable} {ROOT / "examples" / "maxtext.py"} "$@"\n'
    )
    command = str(pathlib.Path(sys.executable).with_name("jaxpp"))
    launch = [command, "launch", "-n", "2", "--", "sh", str(script)]
    return train(folder, 1, launch, "ici_pipeline_parallelism=2", *keys)


def test_several_processes(tmp_path: pathlib.Path) -> None:
    plain = train_plain(tmp_path, 1, *LLAMA, f"steps={STEPS}")
    assert train_launched(tmp_path, *LLAMA, f"steps={STEPS}") == pytest.approx(plain, rel=5e-7)


def test_several_processes_resume(tmp_path: pathlib.Path) -> None:
    """In two processes and in one."""
    straight = train_launched(tmp_path, *LLAMA, f"steps={STEPS}")
    keys = [*LLAMA, "enable_checkpointing=True", "async_checkpointing=False"]
    first = train_launched(tmp_path, *keys, "steps=6")
    shutil.copytree(tmp_path / "test", tmp_path / "copy" / "test")
    assert [*first, *train_launched(tmp_path, *keys, f"steps={STEPS}")] == straight
    rest = train_pipelined(tmp_path / "copy", 2, 1, *keys, f"steps={STEPS}")
    assert [*first, *rest] == pytest.approx(straight, rel=5e-7)

"""The scripts in examples/ in small sizes, each run in a subprocess, as a user would."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import subprocess
import sys
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from locations import ROOT, faster_environment

EXAMPLES = ROOT / "examples"
LIMIT = 600  # seconds; only to make a hang fail

SMALL_GPT2 = [
    *("--layers-per-stage=1", "--num-ubatches=2", "--global-batch=8", "--seq-len=8"),
    *("--vocab-size=32", "--d-model=16", "--n-heads=2", "--mlp-dim=32", "--lr=0.01"),
]


def start(folder: pathlib.Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / script), *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=folder,
        env=faster_environment(),
    )


def output_of(folder: pathlib.Path, script: str, *flags: str) -> str:
    done = start(folder, script, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_of(output: str, line: str) -> list[float]:
    """The losses that follow matches of `line`, which must decrease."""
    losses = [float(x) for x in re.findall(rf"^{line}(\d+\.\d+) tokens/s=\d+$", output, re.M)]
    assert losses == sorted(losses, reverse=True), output
    return losses


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "float16"])
def test_basic_validates_losses_predictions_and_weights(
    dtype: str, tmp_path: pathlib.Path
) -> None:
    sizes = ["--layers=2", "--heads=2", "--hidden_size=16", "--seq_len=8", "--train_steps=3"]
    output = output_of(tmp_path, "basic.py", f"--dtype={dtype}", "--num_ubatches=2", *sizes)
    for what in ("Losses", "Predictions", "Params"):
        assert f"\n[*] `{what}` Validation ... PASS !\n" in output
    assert output.endswith("\nSUCCESS !\n")
    for label in ("jaxpp", "jax"):
        assert len(losses_of(output, rf"\[{label} \d{{4}}/0003\] loss=")) == 3


def test_basic_refuses_layers_that_are_no_stages(tmp_path: pathlib.Path) -> None:
    done = start(tmp_path, "basic.py", "--layers=4", "--pp=3")
    assert done.returncode == 2
    assert "--layers=4 is not a multiple of --pp=3" in done.stderr


@pytest.mark.soak
def test_tiny_gpt2_trains_alike_in_both_systems(tmp_path: pathlib.Path) -> None:
    script = "tiny_gpt2_jaxpp_vs_spmd_dp.py"
    mesh = ["--pp=2", "--dp=1", "--tp=2"]
    output = output_of(
        tmp_path, script, *mesh, *SMALL_GPT2, "--train-steps=22", "--log-every=10"
    )
    assert "=== SPMD data-parallel (jit) on 4 CPUs ===\n[spmd_dp warmup] loss_sum=" in output
    assert "=== JaxPP MPMD pipeline ===\n[jaxpp warmup] loss_sum=" in output
    for system in ("spmd_dp", "jaxpp"):
        progress = rf"\[{system} \d{{4}}/0022\] loss_sum="
        assert len(losses_of(output, progress)) == 3
        order = [
            rf"\[{system} 0010/0022\]",
            rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d.* start profile \({system}\)",
            rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d.* stop profile \({system}\)",
            rf"\[{system} 0020/0022\]",
            rf"\[{system}\] avg step time per step after profiling "
            r"\(steps 20..21\): \d+\.\d+ ms$",
        ]
        assert re.search("(?ms)" + ".*".join(f"^{line}" for line in order), output), output
        assert list(tmp_path.glob(f"tiny-gpt2-trace/{system}/plugins/profile/*/*"))
    assert "losses of spmd_dp and jaxpp agree: at most " in output


# Runs the cells of a notebook one after the other, as Jupyter does.
RUN_CELLS = """
import json, sys
cells = json.loads(open(sys.argv[1]).read())["cells"]
names = {"__name__": "__main__"}
for cell in cells:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
"""


def test_the_tutorials_notebook_and_script_agree() -> None:
    tool = EXAMPLES.parent / "tools" / "notebook.py"
    check = [sys.executable, str(tool), str(EXAMPLES.parent), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("form", ["script", "notebook"])
def test_tutorial_trains_alike_three_times(form: str, tmp_path: pathlib.Path) -> None:
    sizes = ["--num-stages=2", "--num-layers=4", "--num-mb=2", "--batch-size=4", "--seq-len=4"]
    script = "tutorial.py"
    if form == "notebook":
        script = str(tmp_path / "run_cells.py")
        pathlib.Path(script).write_text(RUN_CELLS)
        sizes = [str(EXAMPLES / "tutorial.ipynb"), *sizes]
    output = output_of(tmp_path, script, *sizes, "--width=16", "--num-steps=4")
    progress = re.findall(r"Training loss after step (\d): \d\.\d+ \(\d+ tokens/s\)", output)
    assert progress == ["2", "4"] * 3
    assert (
        "rank 1: ['FusedTask(fwd_1__0, bwd_1__0)', 'FusedTask(fwd_1__1, bwd_1__1)']" in output
    )
    assert "rank 0: ['fwd_0__0', 'fwd_0__1', 'fwd_2__0', 'fwd_2__1', 'bwd_2__0'," in output
    assert "      task_name=fwd_0\n" in output
    # The ranks of the layers, with two layers per stage and then with one.
    ranks = re.findall(r"layer_\d MpmdArray\(shape=\(16, 64\), .*mpmd_idxs=\((\d),\)", output)
    assert "".join(ranks) == "0011" + "0101"
    for label in ("pipeline", "interleaved"):
        trace = json.loads((tmp_path / f"tutorial-trace-{label}.json").read_text())
        assert trace["traceEvents"]
    assert output.count("\nrank   1  ") == 2
    assert output.endswith("\nAll losses agree.\n")


@pytest.mark.soak
def test_named_axes_are_divided_as_the_shape_of_the_mesh_says(tmp_path: pathlib.Path) -> None:
    sizes = [*SMALL_GPT2, "--n-heads=4"]
    output = output_of(tmp_path, "named_axes.py", *sizes, "--train-steps=2", "--log-every=1")
    # A device's shard of the 16 x 32 weight [embed, mlp].
    parts = re.findall(r"up \('embed', 'mlp'\): \(16, 32\), on a device (.*)", output)
    assert parts == ["(16, 8)", "(16, 32)", "(4, 32)", "(8, 16)"]  # TP, DP, FSDP, FSDP + TP
    for name in ("TP", "DP", "FSDP", r"FSDP \+ TP"):
        assert len(losses_of(output, rf"\[{name} \d{{4}}/0002\] loss_sum=")) == 2
    assert "all losses agree: at most " in output


@pytest.mark.soak
@pytest.mark.parametrize(
    "script",
    [
        ["llama.py"],
        pytest.param(["mistral.py", "--window=3"], marks=pytest.mark.soak),
        pytest.param(["mixtral.py", "--experts=4"], marks=pytest.mark.soak),
        pytest.param(["moe.py", "--routing=top2", "--capacity=1"], marks=pytest.mark.soak),
        pytest.param(["moe.py", "--routing=dropless"], marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_decoders_train_alike_with_and_without_a_pipeline(
    script: list[str], tmp_path: pathlib.Path
) -> None:
    sizes = [*SMALL_GPT2, "--n-heads=4", "--train-steps=3", "--log-every=1"]
    output = output_of(tmp_path, *script, *sizes)
    for label in ("pipeline", "plain"):
        assert len(losses_of(output, rf"\[{label} \d{{4}}/0003\] loss_sum=")) == 3
    assert "losses of pipeline and plain agree: at most " in output


def test_decoders_refuse_heads_that_share_no_keys(tmp_path: pathlib.Path) -> None:
    done = start(tmp_path, "llama.py", "--n-heads=4", "--n-kv-heads=3")
    assert done.returncode == 2
    assert "--n-heads=4 is not a multiple of 3, the --n-kv-heads" in done.stderr


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("decoder")


def loss_of(decoder: ModuleType, **options: Any) -> float:
    """The loss of weights and tokens that are the same for all options."""
    model = decoder.Decoder(
        **{"layers": 1, "d_model": 16, "n_heads": 4, "mlp_dim": 8, "vocab_size": 32},
        **{"seq_len": 8, **options},
    )
    weights = decoder.training.init(model, jax.random.key(0))
    tokens = decoder.training.make_batch(model, 4, 1)[0]
    place = decoder.training.place_nowhere
    weights = jax.tree.map(lambda w: 10 * w, weights)  # so that attention and experts matter
    return float(model.loss(weights, tokens, 1, place))


@pytest.mark.soak
def test_a_window_as_long_as_the_sequence_is_none(decoder: ModuleType) -> None:
    whole = loss_of(decoder)
    assert loss_of(decoder, window=8) == pytest.approx(whole, rel=1e-6)
    assert loss_of(decoder, window=2) != pytest.approx(whole, rel=1e-4)


@pytest.mark.soak
def test_experts_with_places_for_all_are_dropless(decoder: ModuleType) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("expert",))
    with jax.set_mesh(mesh):
        dropless = loss_of(decoder, experts=4, routing="dropless")
    assert loss_of(decoder, experts=4, capacity=2) == pytest.approx(dropless, rel=1e-6)
    assert loss_of(decoder, experts=4, capacity=0.5) != pytest.approx(dropless, rel=1e-4)


@pytest.mark.soak
def test_an_spmd_pipeline_loses_what_the_simulation_says(tmp_path: pathlib.Path) -> None:
    sizes = ["--pp=2", "--num-ubatches=4", "--ubatch-size=1", "--seq-len=16", "--d-model=32"]
    output = output_of(tmp_path, "spmd_pipeline.py", *sizes, "--train-steps=2", "--log-every=1")
    for label in ("plain", "spmd", "mpmd"):
        assert len(losses_of(output, rf"\[{label} \d{{4}}/0002\] loss=")) == 2
    lost = re.search(r"^for nobody +(\d+\.\d)% +(\d+\.\d)%$", output, re.M)
    assert lost and lost[1] == "20.0"  # one of five turns is wasted
    assert float(lost[2]) == pytest.approx(20.0, abs=3)
    again = re.search(r"^computed again, .* (\d+\.\d)% +(\d+\.\d)%$", output, re.M)
    assert again and again[1] == "25.0"  # a recomputed forward takes one of four units
    assert 15 < float(again[2]) < 25
    assert output.endswith("losses of spmd and mpmd agree with those of plain JAX\n")
    picture = ElementTree.parse(tmp_path / "spmd-pipeline.svg")
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    # A rank wastes one turn forward and one backward; other tasks are drawn in both panels.
    assert texts.count("Z") == 2 * 2
    assert texts.count("3") == 2 * 2 * 2
    assert "rank 1" in texts


@pytest.mark.soak
def test_pp_vs_no_pp_ends_in_a_table_and_a_picture_of_schedules(tmp_path: pathlib.Path) -> None:
    script = "pp_vs_no_pp_gpt2_pp_tp_dp.py"
    schedules = ["--schedules", "1f1b", "interleaved-1f1b"]
    sizes = [*SMALL_GPT2, "--layers-per-stage=2", "--train-steps=2", "--log-every=1"]
    mesh = ["--pp=2", "--dp=1", "--tp=2"]
    output = output_of(tmp_path, script, "--mode=both", *mesh, *schedules, *sizes)
    last = {}
    for name in ("base", "1f1b", "interleaved-1f1b"):
        losses = losses_of(output, rf"\[{name} \d{{4}}/0002\] loss_sum=")
        assert len(losses) == 2
        last[name] = losses[-1]
    rows = re.findall(r"│ (\S+) +│ +\d+\.\d │ +\d+ │ +(\d\.\d+) │", output)
    assert {name: float(loss) for name, loss in rows} == last
    assert output.endswith("losses of all 3 runs agree\n")
    picture = ElementTree.parse(tmp_path / "schedules.svg")
    lengths = [
        float(bar.attrib["width"])
        for bar in picture.iter("{http://www.w3.org/2000/svg}rect")
        if "x" in bar.attrib
    ]
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    times = [float(ms) for ms in re.findall(r"│ +(\d+\.\d) │ +\d+ │", output)]
    assert [text for text in texts if text.endswith(" ms")] == [f"{ms} ms" for ms in times]
    assert lengths == pytest.approx([400 * ms / max(times) for ms in times], rel=0.05)


def test_pp_vs_no_pp_refuses_an_odd_number_of_layers(tmp_path: pathlib.Path) -> None:
    done = start(tmp_path, "pp_vs_no_pp_gpt2_pp_tp_dp.py", "--layers-per-stage=1")
    assert done.returncode == 2
    assert "--layers-per-stage=1 cannot be halved" in done.stderr

"""What a schedule is worth at scale, by simulation: GPT-3 175B on 64 to 1,024 accelerators.

Compares pipelines of tasks (ours), a pipeline as one SPMD program, and fully sharded data
parallelism, each in the best form that fits the memory: with or without
rematerialisation, with microbatches of one or more sequences, with one or more stages per
rank. `jaxpp simulate` times the schedules; the rest is arithmetic on the figures of a
file:

    python benchmarks/at_scale.py [benchmarks/at_scale.json]
    python benchmarks/at_scale.py --write docs/at_scale.md     # its tables anew

FLOPs of a transformer layer are counted as in arXiv 2104.04473 (its appendix), bytes of its
activations as in arXiv 2205.05198 (equation 2 with sequence parallelism, without the attention
matrix, which fused attention does not keep).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

MARK = "<!-- made by benchmarks/at_scale.py -->"


@dataclasses.dataclass(frozen=True)
class Setting:
    """The figures of the file for a number of accelerators. Times in seconds."""

    parameters: dict[str, Any]
    accelerators: int
    sequences: int  # per step, on all accelerators

    def __getattr__(self, name: str) -> Any:
        for part in ("model", "accelerator", "layout"):
            if name in self.parameters[part]:
                return self.parameters[part][name]
        raise AttributeError(name)

    @property
    def weights(self) -> float:
        return 12 * self.layers * self.hidden**2 + self.vocabulary * self.hidden

    def bytes_of(self, *kinds: str) -> int:
        return sum(self.parameters["bytes_per_parameter"][kind] for kind in kinds)

    # --- One layer, or the logits, of `n` sequences on one accelerator ---

    def _seconds(self, flops: float) -> float:
        return flops / (self.flops * self.matmul_efficiency)

    def weight_flops(self, n: float) -> float:
        """A layer's products with weights: the same number forward as for each kind of
        gradient."""
        return 24 * n * self.sequence * self.hidden**2

    def attention_flops(self, n: float) -> float:
        return 4 * n * self.sequence**2 * self.hidden

    def layer(self, n: float, tensor: int) -> tuple[float, float, float]:
        """Times of a layer's forward, input gradient and weight gradient on `tensor`
        accelerators."""
        products = self._seconds(self.weight_flops(n) / tensor)
        attention = self._seconds(self.attention_flops(n) / tensor)
        talk = self.tensor_talk(n, tensor)
        return products + attention + talk, products + 2 * attention + talk, products

    def tensor_talk(self, n: float, tensor: int) -> float:
        """Two sums over the tensor axis per layer and direction, of activations in 2
        bytes."""
        share = 2 * (tensor - 1) / tensor
        return 2 * share * 2 * n * self.sequence * self.hidden / self.node_bandwidth

    def logits(self, n: float, tensor: int) -> float:
        """The same time forward as for each kind of gradient."""
        return self._seconds(2 * n * self.sequence * self.hidden * self.vocabulary / tensor)

    def activation_bytes(self, n: float, tensor: int) -> float:
        """What a layer keeps for its backward pass."""
        return 34 * n * self.sequence * self.hidden / tensor

    def input_bytes(self, n: float, tensor: int) -> float:
        """The part of it that is kept if the rest is rematerialised."""
        return 2 * n * self.sequence * self.hidden / tensor

    # --- Weights ---

    @property
    def room(self) -> float:
        return self.memory - self.memory_kept_free

    def state_bytes(self, shards: int, data: int) -> float:
        """Weights and gradients of a shard, and the shard's optimizer state divided over
        `data`."""
        mine = self.weights / shards
        return mine * (self.bytes_of("weight", "gradient") + self.bytes_of("optimizer") / data)

    def sum_gradients(self, shards: int, data: int) -> float:
        """Scatters the sums of gradients and gathers the new weights; nothing hides this."""
        share = (data - 1) / data * self.weights / shards
        return share * self.bytes_of("gradient", "weight") / self.network_bandwidth

    @property
    def useful(self) -> float:
        """The seconds that a step's own FLOPs take on all accelerators at their peak."""
        layer = 3 * (self.weight_flops(1) + self.attention_flops(1))
        logits = 6 * self.sequence * self.hidden * self.vocabulary
        flops = self.sequences * (self.layers * layer + logits)
        return flops / self.flops / self.accelerators


@dataclasses.dataclass(frozen=True)
class Result:
    """A step in one form."""

    name: str
    form: str  # stages, sequences and rematerialisation
    step: float
    bubble: float  # share of the step
    memory: float  # bytes of the accelerator that needs most


# --- Pipelines of tasks --------------------------------------------------------------------


def cost_lines(costs: list[tuple[float, ...]]) -> str:
    """The costs of each stage, in the form that --costs reads."""
    rows = (" ".join(f"{c:.9g}" for c in cost) for cost in costs)
    return "".join(f"{i} {row}\n" for i, row in enumerate(rows))


@functools.cache
def simulate(
    name: str,
    stages: int,
    ranks: int,
    microbatches: int,
    costs: str,
    transfer: float,
    *more: str,
) -> Any:
    """The result of `jaxpp simulate`; costs: the lines for its --costs."""
    command = shutil.which("jaxpp", path=str(pathlib.Path(sys.executable).parent)) or "jaxpp"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(costs)
        file.flush()
        sizes = f"--stages={stages} --ranks={ranks} --microbatches={microbatches}".split()
        flags = [*sizes, "--costs", file.name, f"--transfer={transfer:.9g}", "--json", *more]
        done = subprocess.run(
            [command, "simulate", name, *flags], capture_output=True, text=True
        )
    return json.loads(done.stdout) if done.returncode == 0 else None


def stage_costs(s: Setting, stages: int, n: int, remat: bool) -> list[tuple[float, ...]]:
    forward, backward, weight = s.layer(n, s.tensor)
    layers = s.layers / stages
    again = forward if remat else 0.0
    costs = [(layers * forward, layers * (backward + again), layers * weight)] * stages
    last = s.logits(n, s.tensor)
    return [*costs[:-1], tuple(cost + last for cost in costs[-1])]


def task_pipeline(s: Setting, name: str, per_rank: int, n: int, remat: bool) -> Result | None:
    """None if there is no such schedule, or it does not fit."""
    ranks, tensor = s.pipeline, s.tensor
    data = s.accelerators // (ranks * tensor)
    microbatches, rest = divmod(s.sequences, data * n)
    stages = ranks * per_rank
    if rest or not microbatches or s.layers % stages:
        return None
    costs = cost_lines(stage_costs(s, stages, n, remat))
    transfer = s.input_bytes(n, tensor) / s.network_bandwidth + s.latency
    found = simulate(name, stages, ranks, microbatches, costs, transfer)
    if found is None:
        return None
    kept = (s.input_bytes if remat else s.activation_bytes)(n, tensor)
    at_once = s.activation_bytes(n, tensor) * s.layers / stages if remat else 0.0
    activations = max(found["peak_microbatches"]) * kept * s.layers / ranks + at_once
    memory = s.state_bytes(ranks * tensor, data) + activations
    if memory > s.room:
        return None
    step = found["makespan"] + s.sum_gradients(ranks * tensor, data)
    form = f"{per_rank} a rank, {microbatches} of {n}" + (", remat" if remat else "")
    return Result(name, form, step, found["bubble_global"] / step, memory)


# --- What one SPMD program can do ----------------------------------------------------------


def spmd_pipeline(s: Setting, per_rank: int, n: int, remat: bool) -> Result | None:
    """The result of `jaxpp simulate --spmd`. Logits are spread over all accelerators."""
    ranks, tensor = s.pipeline, s.tensor
    data = s.accelerators // (ranks * tensor)
    microbatches, rest = divmod(s.sequences, data * n)
    stages = ranks * per_rank
    if rest or not microbatches or s.layers % stages:
        return None
    layers = s.layers / stages
    costs = cost_lines([tuple(layers * cost for cost in s.layer(n, tensor))] * stages)
    transfer = s.input_bytes(n, tensor) / s.network_bandwidth + s.latency
    name = "gpipe" if per_rank == 1 else "interleaved-gpipe"
    said = simulate(name, stages, ranks, microbatches, costs, transfer, "--spmd")
    if said is None:
        return None
    found = said["spmd_rematerialised" if remat else "spmd"]
    logits = 3 * microbatches * s.logits(n, tensor) / ranks
    kept = (s.input_bytes if remat else s.activation_bytes)(n, tensor)
    # Without the scan over its layers, a stage would keep them all.
    inside = layers * (s.input_bytes(n, tensor) if remat else 0)
    inside += s.activation_bytes(n, tensor) if remat else 0
    memory = s.state_bytes(ranks * tensor, data)
    memory += found["turns"] * kept * (1 if remat else layers)
    memory += inside
    if memory > s.room:
        return None
    step = found["makespan"] + logits + s.sum_gradients(ranks * tensor, data)
    idle = found["lost"] * found["makespan"]
    form = f"{per_rank} a rank, {microbatches} of {n}" + (", remat" if remat else "")
    return Result("SPMD pipeline", form, step, idle / step, memory)


def fully_sharded(s: Setting, tensor: int, n: int, remat: bool) -> Result | None:
    """Weights are gathered one layer at a time, forward and backward, while the previous
    layer computes; gradients are scattered. A microbatch has `n` sequences per group of
    `tensor` accelerators."""
    groups = s.accelerators // tensor
    microbatches, rest = divmod(s.sequences, groups * n)
    if rest or not microbatches:
        return None
    forward, backward, weight = s.layer(n, tensor)
    backward += weight + (forward if remat else 0)
    layer_weights = 12 * s.hidden**2 / tensor
    nodes = s.accelerators / s.per_node
    through_network = layer_weights * tensor / s.per_node * (nodes - 1) / nodes
    in_node = layer_weights * (s.per_node // tensor - 1) / (s.per_node // tensor)
    slowest = max(through_network / s.network_bandwidth, in_node / s.node_bandwidth)
    gather = slowest * s.bytes_of("weight") + s.latency * math.log2(groups)
    scatter = slowest * s.bytes_of("weight") + s.latency * math.log2(groups)
    layer = max(forward, gather) + max(backward, gather + scatter)
    logits = 3 * s.logits(n, tensor)
    kept = s.layers * (s.input_bytes if remat else s.activation_bytes)(n, tensor)
    kept += s.activation_bytes(n, tensor) if remat else 0.0
    everything = s.bytes_of("weight", "gradient", "optimizer")
    memory = everything * s.weights / s.accelerators + kept
    memory += 2 * s.bytes_of("weight", "gradient") * layer_weights
    if memory > s.room:
        return None
    step = microbatches * (s.layers * layer + logits)
    computing = microbatches * (s.layers * (forward + backward) + logits)
    name = "FSDP" if tensor == 1 else f"FSDP, tensor {tensor}"
    form = f"{microbatches} of {n}" + (", remat" if remat else "")
    return Result(name, form, step, 1 - computing / step, memory)


# --- The table -----------------------------------------------------------------------------


def best(results: Iterator[Result | None]) -> Result | None:
    return min((r for r in results if r), key=lambda r: r.step, default=None)


def rows(s: Setting) -> Iterator[tuple[bool, Result]]:
    """For each kind, whether it is one SPMD program, and the best form that fits."""
    sizes = s.parameters["microbatches_of_sequences"]
    several = s.parameters["stages_per_rank"]
    forms = [(n, remat) for n in sizes for remat in (False, True)]
    larger = [(2 * n, remat) for n, remat in forms] + forms
    for tensor in (1, s.tensor):
        yield from (
            (True, r) for r in [best(fully_sharded(s, tensor, *f) for f in larger)] if r
        )
    circular = (spmd_pipeline(s, v, *f) for v in (1, *several) for f in forms)
    yield from ((True, r) for r in [best(circular)] if r)
    kinds = {
        "gpipe": [1],
        "1f1b": [1],
        "interleaved-1f1b": several,
        "zb-h1": [1],
        "interleaved-zb": several,
        "zb-v": [2],
    }
    for name, counts in kinds.items():
        found = best(task_pipeline(s, name, v, *f) for v in counts for f in forms)
        if found:
            yield False, found


def table(s: Setting) -> Iterator[str]:
    found = list(rows(s))
    spmd = min(result.step for is_spmd, result in found if is_spmd)
    columns = ["best form that fits", "step", "idle", "of the peak FLOPs", "memory"]
    yield "| | " + " | ".join(columns) + " | against the best SPMD |"
    yield "|---" * 7 + "|"
    for is_spmd, r in found:
        ratio = "" if is_spmd and r.step > spmd else f"{spmd / r.step:.2f} x"
        yield (
            f"| {r.name} | {r.form} | {r.step:.2f} s | {r.bubble:.1%} | "
            f"{s.useful / r.step:.1%} | {r.memory / 1e9:.0f} GB | {ratio} |"
        )


def report(parameters: dict[str, Any]) -> str:
    lines = []
    sizes = itertools.product(
        parameters["sequences_per_accelerator"], parameters["accelerators"]
    )
    for each, count in sizes:
        s = Setting(parameters, count, int(each * count))
        lines += [f"{count} accelerators, {s.sequences} sequences a step:", "", *table(s), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).with_suffix(".json")
    parser.add_argument("parameters", nargs="?", type=pathlib.Path, default=default)
    parser.add_argument("--write", type=pathlib.Path, help="a file with the tables' mark")
    flags = parser.parse_args()
    text = report(json.loads(flags.parameters.read_text()))
    if not flags.write:
        print(text)
        return
    head, mark, _ = flags.write.read_text().partition(MARK)
    if not mark:
        parser.error(f"{flags.write}: expected the line {MARK}")
    flags.write.write_text(f"{head}{MARK}\n\n{text}")


if __name__ == "__main__":
    main()

"""Checks that the processes of a job run the same step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxpp
from jaxpp.jax_internals.jaxprs import printed_lines
from jaxpp.lower.lowering import Code
from jaxpp.placements import physical_array
from jaxpp.plan.planning import Planned, Traced
from jaxpp.trace.call import Options

__all__ = ["StepIdentity", "identity_of"]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@dataclasses.dataclass
class StepIdentity:
    """The properties of a step that must be equal in every process.

    Args:
      facts: values by the name used in errors, in the order of comparison. program: the lines
      of the step's code, each followed by the user's line.
    """

    facts: dict[str, str]
    program: list[tuple[str, str]]

    @functools.cached_property
    def summary(self) -> bytes:
        """The text that processes exchange: equal if and only if the steps are."""
        code = "\n".join(code for code, _ in self.program)
        return json.dumps({**self.facts, "program": _digest(code.encode())}).encode()

    def packed_program(self) -> bytes:
        """The lines of the program, for a process whose program differs."""
        return zlib.compress(json.dumps(self.program).encode())

    def differing_fact(self, summary: bytes) -> tuple[str, str, str] | None:
        """The first fact that differs from another process's summary: its name, the value here
        and the value there. None if only the programs differ."""
        theirs = json.loads(summary)
        for name, mine in self.facts.items():
            if theirs.get(name) != mine:
                return name, mine, str(theirs.get(name))
        return None

    def differing_line(self, packed: bytes) -> tuple[str, str, str]:
        """The first line that differs from another process's `packed_program`: its place in the
        user's code, the line here and the line there."""
        theirs = json.loads(zlib.decompress(packed))
        end = ("the end of the step", "")
        mine = [*self.program, end]
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a[0] != b[0]),
            min(len(self.program), len(theirs)),
        )
        other = theirs[at] if at < len(theirs) else end
        # "c:f32[4] = mul 0.1:f32[] b": drop the name of the result, which means nothing to a
        # user.
        here, there = (code.rpartition(" = ")[2] for code in (mine[at][0], other[0]))
        return mine[at][1] or other[1], here, there


def _constant_line(number: int, const: Any) -> tuple[str, str]:
    """Describes a captured constant by its contents, if this process holds all of them."""
    kind = jax.typeof(const).str_short(short_dtypes=True)
    here = getattr(physical_array(const), "is_fully_addressable", True)
    contents = _digest(np.asarray(physical_array(const)).tobytes()) if here else "elsewhere"
    return f"constant {number} that the step closes over: {kind} with digest {contents}", ""


def _program_of(planned: Planned, code: Code) -> list[tuple[str, str]]:
    constants = [_constant_line(k, const) for k, const in enumerate(planned.consts)]
    if isinstance(planned, Traced):
        return constants + printed_lines(planned.closed.jaxpr)
    tasks = zip(planned.staged.tasks(), planned.plan.donations(), strict=True)
    return constants + [
        (f"module of task {task.name} with digest {_digest(code.lower(task, row).code)}", "")
        for task, row in tasks
        if task.ops
    ]


def _mesh_text(planned: Planned) -> str:
    mesh = planned.mesh.jax_mesh
    devices = ", ".join(f"{d.id} ({d.device_kind})" for d in mesh.devices.flat)
    return f"{dict(mesh.shape)} along {planned.mesh.mpmd_axis_name!r}, of devices {devices}"


def _names(texts: Sequence[str]) -> str:
    return ", ".join(texts) or "none"


def identity_of(planned: Planned, options: Options, code: Code, client: str) -> StepIdentity:
    """The identity of a step, to compare between processes.

    Args:
      planned: the step. options: the options of the step. code: the StableHLO of its tasks.
      client: the name and version of the plugin that runs it.
    """
    names = planned.arg_names
    arguments = zip(names, planned.in_avals, strict=True)
    donated = [
        name for name, is_donated in zip(names, planned.donated, strict=False) if is_donated
    ]
    facts = {
        "version of jaxpp": jaxpp.__version__,
        "version of JAX": jax.__version__,
        "version of jaxlib": importlib.metadata.version("jaxlib"),
        "plugin": client,
        "mesh": _mesh_text(planned),
        "number of arguments": str(len(planned.in_avals)),
        **{f"argument {name}": str(aval) for name, aval in arguments},
        "list of donated arguments": _names(donated),
        "schedule": planned.schedule_text,
        "steps_in_flight": str(options.steps_in_flight),
        "compiler_options": str(options.compiler_options or {}),
    }
    program = _program_of(planned, code)
    digests = {
        f"digest of the {name}": f"{h:016x}" for name, h in planned.plan.hashes().items()
    }
    return StepIdentity(facts, program + [(f"{k} {v}", "") for k, v in digests.items()])

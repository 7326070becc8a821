"""The properties in which the processes of a job must agree to run the same step."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

import jaxpp
from jaxpp.jax_internals.jaxprs import printed_lines
from jaxpp.lower.lowering import Code
from jaxpp.placements import physical_array
from jaxpp.plan.planned import Planned, Traced
from jaxpp.trace.call import Options

__all__ = ["StepIdentity", "identity_of"]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@dataclasses.dataclass
class StepIdentity:
    """The properties of a step that must be equal in every process, as the library compares
    them (jaxpp/job.h).

    Args:
      facts: one line for each, in the order of comparison.
      program: one line per operation.
      digest: the digest of the program's code.
    """

    facts: str
    program: str
    digest: str

    @property
    def summary(self) -> bytes:
        """The text that processes exchange: equal if and only if the steps are."""
        return f"{self.digest}\n{self.facts}".encode()


def _lines(pairs: Iterable[tuple[str, str]]) -> str:
    text = "".join(f"{label}\t{text}\n" for label, text in pairs)
    return text.encode(errors="backslashreplace").decode()


def _constant_line(number: int, const: Any) -> tuple[str, str]:
    """Describes a captured constant by its contents, if this process holds all of them."""
    kind = jax.typeof(const).str_short(short_dtypes=True)
    here = getattr(physical_array(const), "is_fully_addressable", True)
    contents = _digest(np.asarray(physical_array(const)).tobytes()) if here else "elsewhere"
    return "", f"constant {number} that the step closes over: {kind} with digest {contents}"


def _program_of(planned: Planned, code: Code) -> list[tuple[str, str]]:
    """One line per operation: its place in the user's code, or "", and its code."""
    constants = [_constant_line(k, const) for k, const in enumerate(planned.consts)]
    if isinstance(planned, Traced):
        return constants + [(at, code) for code, at in printed_lines(planned.closed.jaxpr)]
    tasks = zip(planned.staged.tasks(), planned.plan.donations(), strict=True)
    return constants + [
        ("", f"module of task {task.name} with digest {_digest(code.lower(task, row).code)}")
        for task, row in tasks
        if task.ops
    ]


def _mesh_text(planned: Planned) -> str:
    mesh = planned.mesh.jax_mesh
    sizes = [dict(own.shape) for own in planned.mesh.unequal] or dict(mesh.shape)
    devices = ", ".join(f"{d.id} ({d.device_kind})" for d in mesh.devices.flat)
    return f"{sizes} along {planned.mesh.mpmd_axis_name!r}, of devices {devices}"


def _names(texts: Sequence[str]) -> str:
    return ", ".join(texts) or "none"


def identity_of(planned: Planned, options: Options, code: Code, client: str) -> StepIdentity:
    """The identity of a step, to compare between processes.

    Args:
      planned: the step.
      options: the options of the step.
      code: the StableHLO of its tasks.
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
    program += [("", f"{name} {digest}") for name, digest in digests.items()]
    code_digest = _digest("\n".join(code for _, code in program).encode(errors="replace"))
    return StepIdentity(_lines(facts.items()), _lines(program), code_digest)

"""Microbatches, operations and shardings that do not fit."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from cases import JIT, TWO, case, loop, mesh, train, warned

# --- Microbatches -----------------------------------------------------------------------

case(
    "Microbatch axes that differ",
    "microbatch",
    lambda: loop({"x": m.batch(3), "y": m.batch(4)}),
    "mistakes.py:",
    "same size along axis 0",
    "xs['x'] (3, 2, 4): 3",
    "xs['y'] (4, 2, 4): 4",
)
case(
    "An array without the microbatch axis",
    "microbatch",
    lambda: loop({"x": m.batch(), "y": 1.0}),
    "xs['y'] (): no such axis",
)
case(
    "Microbatch axes that differ in a large tree",
    "microbatch",
    lambda: loop([m.batch(2 + k % 2) for k in range(20)]),
    "xs[0] (2, 2, 4): 2",
    "and 12 more",
)
case("Nothing to split", "microbatch", lambda: loop(None), "xs=None", "expected at least one")
case("No microbatches", "microbatch", lambda: loop(m.batch()[:0]), "size 0 along axis 0")
case(
    "An axis that is not a number",
    "microbatch",
    lambda: loop(m.batch(), axis="batch"),
    "axis='batch'",
    "expected a whole number",
)
for length in (0, -1, 2.5, "4", 2**40):
    case(
        f"A loop of length {length!r}",
        "microbatch",
        lambda length=length: JIT(lambda: m.forward_i(m.batch(), length), mesh())(),
        "mistakes.py:",
        f"length={length!r}",
        "expected a whole number from 1",
    )
case(
    "A length that is traced",
    "microbatch",
    lambda: JIT(m.forward_i, mesh())(m.batch(), 3),
    "mistakes.py:",
    "known when the step is traced",
)
case(
    "A loop in a loop",
    "unsupported",
    lambda: JIT(m.loop_in_loop, mesh())(m.params(), m.batch()),
    "inside the treduce at",
    "mistakes.py:",
)
case(
    "A loop under scan",
    "unsupported",
    lambda: JIT(m.loop_in_scan, mesh())(m.batch()),
    "treduce at ",
    "inside `scan` at ",
    "top level",
)
case(
    "A scan over microbatches whose iterations wait for each other",
    "unsupported",
    lambda: JIT(m.scan_with_updates, mesh(), schedule=TWO)(m.params(), m.batch()),
    "jax.lax.scan at ",
    "mistakes.py:",
    "its carry ws[0], float32[4,4], depends on the stages",
    "only add to",
)
case(
    "A scan over microbatches that returns its sums so far",
    "unsupported",
    lambda: JIT(m.scan_of_running_sums, mesh(), schedule=TWO)(m.params(), m.batch()),
    "its carry total, float32[], depends on the stages, and each iteration returns it as well",
)
case(
    "The gradient of a scan over microbatches",
    "unsupported",
    lambda: JIT(m.gradient_of_scan, mesh(), schedule=TWO)(m.params(), m.batch()),
    "jax.lax.scan at ",
    "is differentiated",
    "expected jax.value_and_grad inside",
)
case(
    "A schedule for a scan that has no marks",
    "schedule",
    lambda: JIT(m.training_step(TWO), mesh(), schedule=TWO)(m.params(), m.batch()),
    "at the top level of the step; found none",
)
case(
    "A schedule of a scan that is a name",
    "schedule",
    lambda: JIT(m.scan_of_losses, mesh(), schedule="1f1b")(m.params(), m.batch()),
    "jax.lax.scan at ",
    "schedule='1f1b'",
)
case(
    "The gradient of a loop",
    "unsupported",
    lambda: JIT(m.gradient_of_loop, mesh())(m.params(), m.batch()),
    "mistakes.py:",
    "differentiated; expected jax.grad inside",
)
case(
    "A loop under vmap",
    "unsupported",
    lambda: JIT(m.vmapped_loop, mesh())(m.batch()),
    "mistakes.py:",
    "vmapped; expected jax.vmap inside",
)
case(
    "A custom_vjp around a closure",
    "unsupported",
    lambda: train(TWO, loss=m.closure_in_custom_vjp),
    "closes over a traced value",
    "expected it as an argument of that function",
)

# --- Operations -------------------------------------------------------------------------


def operation(title: str, given: Any, *says: str, fun: Any = None) -> None:
    run = lambda: loop(m.batch(), fun or (lambda x: (x, x)), operation=given)  # noqa: E731
    case(title, "operation", run, "mistakes.py:", *says)


operation(
    "A result tree that does not match `operation`",
    (jaxpp.Add, jaxpp.Add, jaxpp.Max),
    "operation: (Add, Add, Max)",
    "result:    (*, *)",
)
operation("An operation of None", None, "operation: None", "result:    (*, *)")
operation("An operation by name", "add", "'add' is not an operation; expected Add")
operation(
    "An operation without update", m.NoUpdate(), "NoUpdate() is not an operation", "update"
)
operation(
    "An operation that changes its state's dtype",
    m.CountsInIntegers(),
    "result[0]",
    "update(state, value, i) to return a state of type int32[2, 4], found float32[2, 4]",
)
operation("An operation with two states", m.TwoStates(), "to return one array, found tuple")
operation(
    "Concat along a missing axis", jaxpp.Concat(9), "expected an axis from -3 to 2, found 9"
)
operation(
    "Max of complex numbers",
    jaxpp.Max,
    "Max() cannot reduce result, complex64[2, 4]",
    fun=lambda x: x * 1j,
)
operation(
    "Add of PRNG keys",
    jaxpp.Add,
    "expected numbers to sum, found PRNG keys",
    fun=lambda x: jax.random.key(0),
)
operation("Add of bools", jaxpp.Add, "bool[2, 4]", "expected numbers", fun=lambda x: x > 0)
case(
    "A loop whose function returns text",
    "invalid-argument",
    lambda: loop(m.batch(), lambda x: {"loss": "low"}),
    "mistakes.py:",
    "['loss']: expected an array or a number, found 'low'",
)

warned(
    "Gradients that are stacked",
    lambda: JIT(m.gradients_first, mesh())(m.params(), m.batch()),
    "result[0][0], float32[4, 4], looks like the gradient of a weight",
    "Return (loss, grads)",
)

# --- Shardings --------------------------------------------------------------------------


def sharded(title: str, *says: str, **options: Any) -> None:
    run = lambda: train(TWO, mpmd_mesh=mesh(2, data=2, model=2), **options)  # noqa: E731
    case(title, "sharding", run, *says)


sharded(
    "A spec that names an unknown axis",
    "in_specs of ws[0]",
    "axis 'modle'",
    "expected one of the mesh's axes ('stage', 'data', 'model')",
    in_specs=(P("modle"), P()),
)
sharded(
    "A spec that does not divide",
    "in_specs of xs",
    "expected a multiple of 2, found 3",
    in_specs=(P(), P("data")),
)
sharded(
    "A spec of too many dimensions",
    "in_specs of xs",
    "has 4 entries; expected at most 3",
    in_specs=(P(), P(None, None, None, "data")),
)
sharded(
    "A spec that names an axis twice",
    "in_specs of ws[0]",
    "'data' 2 times; expected each axis at most once",
    in_specs=(P("data", "data"), P()),
)
sharded(
    "Specs of another tree than the arguments",
    "in_specs: (P(), P(), P())",
    "arguments: ([*, *], *)",
    in_specs=(P(), P(), P()),
)
sharded(
    "Specs of another tree than the results",
    "out_specs: (P(), P(), P())",
    "results: ([*, *], *)",
    out_specs=(P(), P(), P()),
)
sharded(
    "A result's spec that does not fit",
    "out_specs of result[1]",
    "has 1 entries; expected at most 0",
    out_specs=(P(), P("data")),
)
warned(
    "A spec that names the pipeline axis",
    lambda: train(TWO, in_specs=(P(), P("stage"))),
    "in_specs of xs: P('stage',) names 'stage', the pipeline axis of the mesh",
    "which shards nothing",
)
warned(
    "A result's sharding that names the pipeline axis",
    lambda: train(TWO, out_shardings=(None, NamedSharding(mesh().jax_mesh, P("stage")))),
    "out_shardings of result[1]: P('stage',) names 'stage', the pipeline axis of the mesh",
)
sharded("Text for a spec", "expected PartitionSpecs", "found 'data'", in_specs=("data", P()))
sharded(
    "A sharding without a spec",
    "expected PartitionSpecs",
    "found SingleDeviceSharding",
    in_shardings=(jax.sharding.SingleDeviceSharding(jax.devices()[0]), None),
)
sharded(
    "A constraint that names an unknown axis",
    "mistakes.py:",
    "modle",
    "('stage', 'data', 'model')",
    loss=m.unknown_axis_in_constraint,
)
case(
    "Specs and shardings",
    "invalid-argument",
    lambda: train(TWO, in_specs=P(), in_shardings=P()),
    "expected in_specs or in_shardings, found both",
)

"""The MLIR that JAX lowers to."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec
from jaxlib import xla_client
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy, stablehlo

from jaxpp.jax_internals.mlir import MANUAL, Axes, behind, mesh_of, operations, sharded_axes
from jaxpp.jax_internals.partial import Partials

__all__ = [
    "LoweredModule",
    "SharedContext",
    "element_type_name",
]


def _spec_of(
    dimensions: Sequence[tuple[str, ...]] | None, aval: Any, mesh: Mesh
) -> PartitionSpec:
    """The spec of a propagated sharding, without entries that do not divide their dimension."""
    if dimensions is None or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return PartitionSpec()
    parts: list[Any] = []
    for size, axes in zip(aval.shape, dimensions, strict=True):
        ways = math.prod(mesh.shape[a] for a in axes)
        keep = axes and ways > 1 and size % ways == 0
        parts.append((axes[0] if len(axes) == 1 else axes) if keep else None)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


# JAX 0.10.2, 0.11.2: the name of the operation and of its attribute.
def _custom_calls(op: Any, targets: Sequence[str]) -> Iterator[Any]:
    """The custom calls to `targets`. (MLIR's own walk turns Ctrl-C into a RuntimeError.)"""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if (
                    inner.operation.name == "stablehlo.custom_call"
                    and inner.attributes["call_target_name"].value in targets
                ):
                    yield inner
                yield from _custom_calls(inner, targets)


def _func_calls(operation: Any) -> Iterator[Any]:
    """The function calls in an operation at any depth, including the operation itself."""
    if operation.name == "func.call":
        yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _func_calls(inner.operation)


# JAX 0.10.2, 0.11.2: jaxlib's stablehlo.
def _portable_version() -> str:
    """The StableHLO version that plugins up to twelve weeks old can read."""
    twelve_weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_12
    version: str = stablehlo.get_version_from_compatibility_requirement(twelve_weeks)
    return version


def _functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name."""
    return {
        op.attributes["sym_name"].value: op
        for op in module.regions[0].blocks[0].operations
        if op.operation.name == "func.func"
    }


# JAX 0.10.2, 0.11.2: jaxlib's MLIR bindings.
def _inline_calls(module: Any) -> None:
    """Inlines a function at each of its calls.

    Shardy propagates shardings into a call but not always out of it: it would report values
    that a loop stacks through calls for weight gradients as unsharded.
    """
    functions = _functions(module)
    calls = list(_func_calls(module))
    while calls:
        call = calls.pop()
        copy = functions[call.attributes["callee"].value].operation.clone()
        body = copy.regions[0].blocks[0]
        for argument, operand in zip(body.arguments, call.operands, strict=True):
            argument.replace_all_uses_with(operand)
        for op in list(body.operations):
            if op.operation.name == "func.return":
                for result, value in zip(call.results, op.operands, strict=True):
                    result.replace_all_uses_with(value)
            else:
                op.operation.move_before(call)
                calls += _func_calls(op.operation)
        call.erase()
        copy.erase()


# JAX 0.10.2, 0.11.2: jaxlib's pass manager with Shardy's pipeline; sdy.sharding.
class Propagated:
    """The shardings that Shardy finds for the values of a module, without modifying the
    module."""

    def __init__(self, module: Any, mesh: Mesh) -> None:
        self._module = module
        self._mesh = mesh
        copy = module.clone()
        # Numbers map the operations of the copy, inlined and simplified, to those of the
        # module.
        original = list(operations(module))
        for number, op in enumerate(operations(copy)):
            op.attributes["number"] = ir.IntegerAttr.get(ir.IntegerType.get(64), number)
        _inline_calls(copy)
        passes = passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
        passes.enable_verifier(False)  # that takes longer than the passes themselves
        passes.run(copy)
        main = _functions(copy)["main"]
        self._arguments = self._of_rows(main.arg_attrs)
        self._results = self._of_rows(main.attributes["res_attrs"])
        self._of_ops: dict[Any, list[Any]] = {}
        found: dict[Any, list[Any]] = {}  # by attribute; many operations have the same

        def of_results(sharding: Any) -> list[Any]:
            if sharding not in found:
                values = sdy.TensorShardingPerValueAttr(sharding)
                found[sharding] = [sharded_axes(value) for value in values.shardings]
            return found[sharding]

        for op in original:
            if op.name == "sdy.sharding_constraint":
                self._of_ops[op.results[0]] = [sharded_axes(op.attributes["sharding"])]
            elif op.name == MANUAL and op.results:
                self._of_ops[op.results[0]] = of_results(op.attributes["out_shardings"])
        for op in operations(copy):
            attributes = op.attributes
            name = "out_shardings" if op.name == MANUAL else "sdy.sharding"
            if "number" in attributes and name in attributes and op.results:
                first = original[attributes["number"].value].results[0]
                self._of_ops[first] = of_results(attributes[name])

    @staticmethod
    def _of_rows(rows: Any) -> list[Any]:
        found = [row["sdy.sharding"] if "sdy.sharding" in row else None for row in rows]
        return [None if sharding is None else sharded_axes(sharding) for sharding in found]

    def specs(
        self, arguments: Sequence[Any], results: Sequence[Any]
    ) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """The specs of main's arguments and results, whose types are given."""

        def specs(found: Any, avals: Sequence[Any]) -> list[PartitionSpec]:
            return [_spec_of(d, a, self._mesh) for d, a in zip(found, avals, strict=True)]

        return specs(self._arguments, arguments), specs(self._results, results)

    @functools.cached_property
    def partials(self) -> Partials:
        """The partial sums among main's results."""
        mesh, sizes = mesh_of(self._module), dict(self._mesh.shape)
        return Partials(_functions(self._module), mesh, sizes, self._arguments, self._of_ops)


# --- The context of several modules -----------------------------------------------------

_shared: contextvars.ContextVar[SharedContext | None] = contextvars.ContextVar(
    "shared", default=None
)


class SharedContext:
    """An MLIR context for several modules. JAX 0.10.2 makes one for each module that it lowers,
    which takes up to half the time of lowering a small one."""

    def __init__(self) -> None:
        self.context: ir.Context | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Modules that this thread lowers here have this context. Other threads may not use it
        at the same time."""
        token = _shared.set(self)
        try:
            yield
        finally:
            _shared.reset(token)


# JAX 0.10.2: interpreters.mlir.make_ir_context. JAX 0.11.2 shares contexts itself.
def _share_contexts() -> None:
    make = mlir.make_ir_context

    @functools.wraps(make)
    def make_ir_context() -> ir.Context:
        shared = _shared.get()
        if shared is None:
            return make()
        if shared.context is None:
            shared.context = make()
        return shared.context

    mlir.make_ir_context = make_ir_context


if jax.__version_info__ < (0, 11):
    _share_contexts()


# --- Modules ----------------------------------------------------------------------------


# JAX 0.10.2, 0.11.2: a lowered function's compiler_ir and `_lowering`; each method names
# the others.
class LoweredModule:
    """A JAX function lowered to a StableHLO module, which can still be modified."""

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self._module = lowered.compiler_ir("stablehlo")
        # The callbacks that JAX would add to its own client's table.
        self.callback_functions: Sequence[Callable[..., Any]] = lowered._lowering.compile_args[
            "host_callbacks"
        ]

    def _main(self) -> Any:
        return _functions(self._module.operation)["main"]

    # JAX 0.10.2, 0.11.2: tf.aliasing_output, as JAX itself writes it.
    def set_aliases(self, donations: Sequence[int | None]) -> None:
        """Tells XLA which output reuses each argument's memory; one entry per argument."""
        if all(d is None for d in donations):
            return
        with self._module.context:
            main = self._main()
            i32 = ir.IntegerType.get_signless(32)
            rows = []
            for row, output in zip(main.arg_attrs, donations, strict=True):
                attributes = {named.name: named.attr for named in row}
                if output is not None:
                    attributes["tf.aliasing_output"] = ir.IntegerAttr.get(i32, output)
                rows.append(ir.DictAttr.get(attributes))
            main.arg_attrs = ir.ArrayAttr.get(rows)

    # JAX 0.10.2, 0.11.2: sdy.sharding as JAX itself writes it.
    def keep_partial(
        self, arguments: dict[int, Axes], results: dict[int, Axes], mesh: Mesh
    ) -> None:
        """Makes arguments and results of main, by number, partial over axes of the mesh."""
        with self._module.context:
            partials = self.propagate(mesh).partials
            main = self._main()
            for name, numbers in (("arg_attrs", arguments), ("res_attrs", results)):
                rows = list(main.attributes[name])
                for k, axes in numbers.items():
                    row = {named.name: named.attr for named in ir.DictAttr(rows[k])}
                    dims = sharded_axes(row["sdy.sharding"])
                    row["sdy.sharding"] = partials.attribute(dims, axes)
                    rows[k] = ir.DictAttr.get(row)
                main.attributes[name] = ir.ArrayAttr.get(rows)
            partials.keep(arguments, results)

    # JAX 0.10.2, 0.11.2: jaxlib's sdy.
    def replicate(self, results: Sequence[int], axes: Sequence[str]) -> None:
        """Prevents the users of main's results, given by number, from sharding them over
        these axes."""
        with self._module.context, ir.Location.unknown():
            *_, end = self._main().regions[0].blocks[0].operations
            mesh = mesh_of(self._module.operation)
            replicated = [sdy.AxisRefAttr.get(axis) for axis in axes]
            open_dimension = sdy.DimensionShardingAttr.get([], False)
            for k in results:
                value = end.operands[k]
                dims = [open_dimension] * ir.RankedTensorType(value.type).rank
                name = mesh.attributes["sym_name"].value
                sharding = sdy.TensorShardingAttr.get(name, dims, replicated)
                with behind(value):
                    kept = sdy.ShardingConstraintOp(value, sharding)
                value.replace_all_uses_except(kept.result, [kept.operation, end.operation])

    # JAX 0.10.2, 0.11.2: jaxlib's sdy; mhlo.num_partitions.
    def set_sizes(self, mesh: Mesh) -> bool:
        """Replaces the mesh by one whose axes have other sizes; shapes in the module are those
        of whole arrays. Returns False if the module has parts for each device."""
        module = self._module.operation
        names = {op.operation.name for op in operations(module)}
        if MANUAL in names:
            return False
        with self._module.context:
            axes = [sdy.MeshAxisAttr.get(name, size) for name, size in mesh.shape.items()]
            own = mesh_of(module)
            if own is not None:
                own.attributes["mesh"] = sdy.MeshAttr.get(axes)
                if "stablehlo.mesh" in own.attributes:  # the same in another form
                    del own.attributes["stablehlo.mesh"]
            count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), mesh.size)
            module.attributes["mhlo.num_partitions"] = count
        return True

    def propagate(self, mesh: Mesh) -> Propagated:
        """The shardings that Shardy finds."""
        with self._module.context:
            return Propagated(self._module.operation, mesh)

    # JAX 0.10.2, 0.11.2: mhlo.backend_config's index into the table of callbacks.
    def redirect_callbacks(
        self,
        targets: Sequence[str],
        target: str,
        attribute: str,
        make: Callable[[Callable[..., Any], Any, Any], tuple[Any, int]],
    ) -> list[Any]:
        """Redirects each custom call to one of `targets` to `target`.

        `make` takes the Python function and the types of operands and results, each as
        (name of the element type in MLIR, shape), and returns an object and its address.
        The address becomes the call's only attribute, named `attribute`.
        """
        made = []
        with self._module.context:
            for op in list(_custom_calls(self._module.operation, targets)):
                index = ir.IntegerAttr(op.attributes["mhlo.backend_config"]["index"]).value
                types = [
                    [ir.RankedTensorType(v.type) for v in values]
                    for values in (op.operands, op.results)
                ]
                named = [[(str(t.element_type), tuple(t.shape)) for t in ts] for ts in types]
                callback, address = make(self.callback_functions[index], *named)
                u64 = ir.IntegerType.get_unsigned(64)
                named_address = {attribute: ir.IntegerAttr.get(u64, address)}
                op.attributes["mhlo.backend_config"] = ir.DictAttr.get(named_address)
                op.attributes["call_target_name"] = ir.StringAttr.get(target)
                made.append(callback)
        return made

    # JAX 0.10.2, 0.11.2: an operation's clone and get_asm.
    def printer(self) -> Callable[[], str]:
        """The text of the module in its current state."""
        copy = self._module.operation.clone()
        return lambda: copy.get_asm(assume_verified=True)  # JAX has verified it

    # JAX 0.10.2, 0.11.2: interpreters.mlir.module_to_bytecode; serialize_portable_artifact of
    # jaxlib's stablehlo and of its XLA.
    def into_bytecode(self) -> bytes:
        """The module in a form that plugins of other XLA versions can read; consumes the
        module."""
        version = _portable_version()
        code = mlir.module_to_bytecode(self._module)
        # Bytecode names the dialects it uses. XLA's own serializer converts them to StableHLO,
        # but it parses the module again, which takes ten times as long.
        if any(dialect in code for dialect in (b"chlo\0", b"mhlo\0", b"sdy\0")):
            return xla_client._xla.mlir.serialize_portable_artifact(code, version)
        return stablehlo.serialize_portable_artifact(self._module, version)


# JAX 0.10.2, 0.11.2: interpreters.mlir.make_ir_context and module_to_bytecode; jaxlib's
# stablehlo.
def replace_addresses(
    code: bytes, target: str, attribute: str, addresses: Mapping[int, int]
) -> bytes:
    """Bytecode with the addresses in `attribute` of the calls to `target` replaced."""
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, code)
        for op in list(_custom_calls(module.operation, (target,))):
            found = ir.IntegerAttr(op.attributes["mhlo.backend_config"][attribute])
            renewed = ir.IntegerAttr.get(found.type, addresses[found.value])
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get({attribute: renewed})
        return stablehlo.serialize_portable_artifact(module, _portable_version())


# JAX 0.10.2, 0.11.2: interpreters.mlir.make_ir_context and dtype_to_ir_type.
def element_type_name(dtype: Any) -> str:
    """The name of a dtype's element type in MLIR."""
    with mlir.make_ir_context():
        return str(mlir.dtype_to_ir_type(np.dtype(dtype)))

"""JAX's functions return bitwise the same for an MpmdArray as for a jax.Array.

FUNCTIONS is a table of calls. Each is made with `MpmdArray`s of every placement and with
jax.Arrays of the same contents. If JAX refuses a jax.Array, it must refuse an MpmdArray with
the same type of exception.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.flatten_util import ravel_pytree

import jaxpp.api as jaxpp
from array_placements import WHOLE, by_parts
from equality import make_mesh, mesh_of, some_devices
from jaxpp.api import MpmdArray

Outcome = tuple[str, Any]

# --- Results of calls -------------------------------------------------------------------


def bits(x: Any) -> Any:
    """Everything about a result that must agree, such as its dtype, shape and bytes."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return (str(x.dtype), bits(jax.random.key_data(x)))
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        weak = bool(getattr(x, "weak_type", False))
        return (str(x.dtype), np.shape(x), weak, np.asarray(x).tobytes())
    if isinstance(x, jax.ShapeDtypeStruct):
        return (x.shape, str(x.dtype), bool(x.weak_type), str(x.sharding))
    if isinstance(x, str | bytes | bool | int | float | complex):
        return x
    return str(x)


def outcome(call: Callable[..., Any], *args: Any) -> Outcome:
    """The structure and contents of a call's result, or the type of its exception."""
    try:
        leaves, tree = jax.tree.flatten(call(*args))
    except jaxpp.JaxppError:
        raise
    except Exception as error:
        return type(error).__name__, None
    return str(tree), [bits(leaf) for leaf in leaves]


def loss_of(x: Any) -> Any:
    return jnp.sum(jnp.sin(x) ** 2)


def training_steps(x: Any) -> Any:
    """Two steps of Adam on a tree that contains the array twice."""
    params, optimizer = {"a": x, "b": [x]}, optax.adam(1e-2)
    state = optimizer.init(params)
    for _ in range(2):
        grads = jax.grad(lambda p: loss_of(p["a"]) + loss_of(p["b"][0]))(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


# --- The tables -------------------------------------------------------------------------

UNARY = ["negative", "positive", "abs", "invert", "sign", "exp", "tanh", "square", "isnan"]
REDUCTIONS = [
    "sum",
    "mean",
    "max",
    "min",
    "prod",
    "std",
    "var",
    "any",
    "all",
    "argmax",
    "argmin",
]
BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, divmod, operator.and_, operator.or_, operator.xor),
    *(operator.lshift, operator.rshift, operator.eq, operator.ne, operator.lt, operator.le),
    *(operator.gt, operator.ge),
]

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{f"jnp.{name}": getattr(jnp, name) for name in [*UNARY, *REDUCTIONS]},
    **{f".{name}()": lambda x, n=name: getattr(x, n)() for name in REDUCTIONS},
    **{f"{op.__name__}(x, x)": lambda x, op=op: op(x, x) for op in BINARY},
    **{f"{op.__name__}(x, 2)": lambda x, op=op: op(x, 2) for op in BINARY},
    **{f"{op.__name__}(2.5, x)": lambda x, op=op: op(2.5, x) for op in BINARY},
    "numpy + x": lambda x: np.ones(3, np.float32) + x,
    "jax + x": lambda x: jnp.ones(3, jnp.bfloat16) + x,
    "x + numpy": lambda x: x + np.ones(3, np.float64),
    "x @ x.T": lambda x: x @ x.T,
    ".T": lambda x: x.T,
    ".mT": lambda x: x.mT,
    ".real .imag": lambda x: (x.real, x.imag),
    ".conj()": lambda x: x.conj(),
    ".reshape": lambda x: (x.reshape(-1), x.ravel(), x.flatten(), x.squeeze()),
    ".transpose": lambda x: (x.transpose(), x.swapaxes(0, -1)),
    ".astype": lambda x: x.astype(jnp.float16),
    ".at": lambda x: (x.at[0].set(1), x.at[1].add(x[0])),
    "[]": lambda x: (x[0], x[..., 1], x[-1:], x[x == x]),
    "iter": list,
    "in": lambda x: 1 in x,
    "sizes": lambda x: (x.shape, x.ndim, x.size, x.nbytes, x.itemsize, len(x)),
    "unary": lambda x: (-x, +x, abs(x), round(x, 1)),
    "~x": lambda x: ~x,
    "scalar": lambda x: (x[0, 0].item(), float(x[0, 1]), round(x[0, 0], 2)),
    "jit": lambda x: jax.jit(lambda a, b: (a + b[::-1], a))(x, x),
    "jit by keyword": lambda x: jax.jit(lambda *, a: a * 2)(a=x),
    "jit, closed over": lambda x: jax.jit(lambda b: (b + x, x))(2),
    "jit, identity": jax.jit(lambda x: x),
    "jit ahead of time": lambda x: jax.jit(jnp.cos).lower(x).compile()(x),
    "grad": jax.grad(loss_of),
    "value_and_grad": jax.value_and_grad(loss_of),
    "hessian": lambda x: jax.hessian(loss_of)(x[0]),
    "jvp": lambda x: jax.jvp(jnp.sin, (x,), (x,)),
    "vjp": lambda x: jax.vjp(jnp.sin, x)[1](x),
    "linearize": lambda x: jax.linearize(jnp.sin, x)[1](x),
    "vmap": jax.vmap(lambda row: row * 2),
    "vmap of one of two": lambda x: jax.vmap(lambda a, b: a + b, (0, None))(x, x),
    "checkpoint": lambda x: jax.grad(jax.checkpoint(loss_of))(x),
    "cond": lambda x: jax.lax.cond(True, lambda a: a, lambda a: a, x),
    "scan": lambda x: jax.lax.scan(lambda c, row: (c, row), x, x),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c, x),
    "make_jaxpr": lambda x: str(jax.make_jaxpr(lambda a: a == a)(x)),
    "eval_shape": lambda x: jax.eval_shape(lambda a: (a, a.T), x),
    "typeof": lambda x: str(jax.typeof(x)),
    "ShapeDtypeStruct": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    "result_type": lambda x: str(jnp.result_type(x, 1, np.float16)),
    "promote_types": lambda x: str(jnp.promote_types(x.dtype, jnp.int8)),
    "device_put": jax.device_put,
    "device_get": jax.device_get,
    "block_until_ready": jax.block_until_ready,
    "zeros_like": lambda x: (jnp.zeros_like(x), jnp.ones_like(x), jnp.full_like(x, 3)),
    "array": lambda x: (jnp.array(x), jnp.asarray(x), jnp.copy(x), jnp.array([x, x])),
    "stack": lambda x: (jnp.stack([x, x]), jnp.concatenate([x, x], 1), jnp.where(x == x, x, x)),
    "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "dot": lambda x: jax.lax.dot(x, x.T),
    "sort": lambda x: (jnp.sort(x), jnp.argsort(x), x.cumsum(0)),
    "nn": lambda x: (jax.nn.softmax(x), jax.nn.relu(x)),
    "ravel_pytree": lambda x: ravel_pytree({"a": x, "b": [x]})[0],
    "tree": lambda x: jax.tree.map(lambda a: a + a, {"a": x, "b": (x,)}),
    "global_norm": lambda x: optax.global_norm({"a": x, "b": x}),
    "optimizers' states": lambda x: [
        make(1e-2).init([x]) for make in (optax.adam, optax.lion, optax.adafactor, optax.sgd)
    ],
    "training": training_steps,
    "flax's bytes": lambda x: serialization.to_bytes({"a": x}),
    "flax's state": lambda x: serialization.from_state_dict({"a": x}, {"a": x}),
    "numpy.asarray": lambda x: (np.asarray(x), np.array(x), np.asarray(x, np.float64)),
    "numpy's functions": lambda x: (np.sum(x), np.mean(x, axis=0), np.stack([x, x])),
    "dlpack": lambda x: (jnp.from_dlpack(x), np.from_dlpack(x)),
    "tolist": lambda x: str(x.tolist()),
    "tobytes": lambda x: str(x.tobytes()),
    "weakref": lambda x: weakref.ref(x)().shape,
    "str": lambda x: (str(x), f"{x}", f"{x.sum()}"),
}

KEYS: dict[str, Callable[[Any], Any]] = {
    "device_get": jax.device_get,
    "key_data": jax.random.key_data,
    "key_impl": lambda k: str(jax.random.key_impl(k)),
    "split": lambda k: jax.random.split(k[0]),
    "fold_in": lambda k: jax.random.fold_in(k[1], 3),
    "normal": lambda k: jax.random.normal(k[0], (3,)),
    "clone": lambda k: jax.random.clone(k),
    "permutation": lambda k: jax.random.permutation(k[0], 5),
    "under jit": lambda k: jax.jit(lambda a: jax.random.uniform(a[0], (2,)))(k),
    "closed over": lambda k: jax.jit(lambda x: x + jax.random.uniform(k[0]))(1.0),
    "under vmap": jax.vmap(lambda a: jax.random.uniform(a, (2,))),
    "in a scan": lambda k: jax.lax.scan(lambda c, a: (c, jax.random.bits(a)), 0, k),
    "shapes": lambda k: (k.shape, k.reshape(2, 1), k.T, k[::-1], list(k)),
    "jnp": lambda k: (jnp.stack([k, k]), jnp.zeros_like(k), k == k),
    "device_put": jax.device_put,
    "refused": lambda k: k + 1,
}

DTYPES = [
    *("bool", "int4", "int8", "uint32", "bfloat16", "complex64", "float8_e5m2"),
]
# Calls that only move elements, for dtypes on which JAX supports little arithmetic.
MOVING = {
    *(".T", ".mT", ".reshape", ".transpose", "[]", "iter", "sizes", "jit, identity", "cond"),
    *("scan", "fori_loop", "typeof", "eval_shape", "device_put", "device_get", "zeros_like"),
    *("numpy.asarray", "flax's bytes", "numpy + x", "add(x, 2)", "add(x, x)", ".astype"),
    *("jnp.sum", "grad", "jit, closed over", "dlpack", "truediv(x, 2)", "eq(x, x)", "unary"),
    *("~x", "and_(x, x)", "scalar", "tolist"),
}


def matrix(dtype: str) -> jax.Array:
    """A (4, 3) matrix with negative numbers and a zero; floats are fractional."""
    numbers = jnp.arange(-5, 7).reshape(4, 3)
    if jnp.issubdtype(dtype, jnp.inexact):
        return (numbers * 0.37).astype(dtype)
    return numbers.astype(dtype) if dtype != "bool" else numbers > 0


def check(array: MpmdArray, plain: jax.Array, names: Any, table: Any = FUNCTIONS) -> None:
    """Asserts that no call differs; the message lists those that do, by name."""
    assert type(array) is MpmdArray and type(plain) is not MpmdArray
    wrong = {
        name: (found, expected)
        for name in names
        for found, expected in [(outcome(table[name], array), outcome(table[name], plain))]
        if found != expected
    }
    assert not wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", WHOLE)
def test_functions_of_floats(place: str) -> None:
    plain = matrix("float32")
    names = FUNCTIONS if place == "one rank" else MOVING | {"training", "global_norm", "jit"}
    check(WHOLE[place](plain), plain, names)


@pytest.mark.sample(2)
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("along", [0, 1])
def test_functions_of_an_array_in_parts(along: int, axes: dict[str, int]) -> None:
    rows = jnp.arange(32.0, dtype=jnp.float32).reshape(8, 4) * 0.37
    names = MOVING - {"numpy + x"} | {"training", "global_norm", "jit", "x @ x.T"}
    check(by_parts(rows, along, **axes), rows, names)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_of_other_dtypes(dtype: str) -> None:
    plain = matrix(dtype)
    check(WHOLE["replicated and sharded"](plain), plain, MOVING)
    check(WHOLE["by hand"](plain), plain, ["add(x, 2)", "[]", "numpy.asarray"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [2, 2.5, 1 + 2j, True], ids=str)
def test_weak_types_promote_as_in_jax(number: Any) -> None:
    plain = jnp.asarray(number)
    array = jaxpp.mpmd_jit_with_loop(lambda x: x, make_mesh(2))(number)
    assert array.weak_type == plain.weak_type
    for other in (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int8), np.float16(1), 3, 0.5):
        for op in (operator.add, operator.mul, operator.eq):
            assert outcome(op, array, other) == outcome(op, plain, other)
            assert outcome(op, other, array) == outcome(op, other, plain)
    check(array, plain, ["typeof", "result_type", "array", "device_put", "eval_shape"])


def test_functions_of_keys() -> None:
    plain = jax.random.split(jax.random.key(7), 2)
    check(WHOLE["sharded"](plain), plain, KEYS, KEYS)
    for place in WHOLE.values():
        check(place(plain), plain, ["split", "closed over", "under vmap"], KEYS)
    other = jax.random.split(jax.random.key(7, impl="rbg"), 2)
    check(WHOLE["replicated"](other), other, ["key_impl", "split", "under jit"], KEYS)


# --- Several arrays in a call, and the call's context -----------------------------------


def test_arrays_of_several_ranks_in_one_call() -> None:
    x = matrix("float32")
    arrays = [place(x) for place in WHOLE.values()]
    step = jax.jit(lambda *a: sum(k * b for k, b in enumerate(a)))
    assert bits(step(*arrays)) == bits(step(*[x] * len(arrays)))
    both = step(arrays[0], x, np.asarray(x), arrays[1], 2.0)
    assert bits(both) == bits(step(x, x, np.asarray(x), x, 2.0))


def test_an_array_goes_where_the_others_are() -> None:
    """An MpmdArray is uncommitted, like a numpy array."""
    some_devices(4)
    x = matrix("float32")
    for place in WHOLE.values():
        array = place(x)
        assert not array.committed
        there = jax.device_put(x, jax.devices()[3])
        assert (array + there).devices() == {jax.devices()[3]}
        assert jax.jit(jnp.sin)(array).devices() == {jax.devices()[0]}
        with jax.default_device(jax.devices()[5]):
            assert jax.jit(jnp.sin)(array).devices() == {jax.devices()[5]}
        assert jax.device_put(array, jax.devices()[2]).devices() == {jax.devices()[2]}


@pytest.mark.own_devices
def test_under_a_mesh() -> None:
    mesh, x = make_mesh(2, data=2), matrix("float32")
    rows = jax.sharding.NamedSharding(mesh.jax_mesh, jax.sharding.PartitionSpec("data"))
    for place in WHOLE.values():
        array = place(x)
        with mesh:
            assert bits(array * 2) == bits(x * 2)
        with jax.set_mesh(mesh.jax_mesh):
            assert bits(jnp.sum(array)) == bits(jnp.sum(x))
            pinned = jax.jit(lambda a: jax.lax.with_sharding_constraint(a, rows))(array)
            assert pinned.sharding.is_equivalent_to(rows, 2)
        assert bits(pinned) == bits(x)
        assert bits(jax.jit(jnp.sin, in_shardings=rows)(array)) == bits(jnp.sin(x))
        moved = jax.device_put(array, rows)
        assert moved.sharding == rows and bits(moved) == bits(x)
        assert bits(jax.device_put(array, jaxpp.MpmdSharding(mesh, {1}, rows.spec))) == bits(x)


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_arrays_of_x64_stay_what_they_are(dtype: str) -> None:
    """64-bit arrays keep their dtype outside `jax.enable_x64`, as jax.Arrays do."""
    with jax.enable_x64(True):
        plain = jnp.arange(3).astype(dtype) * 2**33 + 1
        assert plain.dtype == dtype
        step = jaxpp.mpmd_jit_with_loop(lambda x: x + 0, make_mesh(2))
        arrays = [step(plain), WHOLE["by hand"](plain), WHOLE["one rank"](plain)]
        for array in arrays:
            assert bits(array * 2) == bits(plain * 2)
    for array in arrays:
        for call in (jax.device_put, jax.jit(lambda x: x[0]), lambda x: x.first_mpmd_replica):
            assert np.asarray(call(array)).dtype == plain.dtype
        assert bits(jax.jit(jnp.stack)([array, array])) == bits(jax.jit(jnp.stack)([plain] * 2))
        np.testing.assert_array_equal(array, plain)


def test_it_is_no_tracer_and_no_constant_of_the_cache() -> None:
    """A function is traced once for all arrays of a type, whatever their placement."""
    traces = []

    @jax.jit
    def count(x: Any) -> Any:
        traces.append(x.shape)
        return x + 1

    x = matrix("float32")
    for place in WHOLE.values():
        assert bits(count(place(x * 2))) == bits(x * 2 + 1)
    assert bits(count(x)) == bits(x + 1)
    assert traces == [(4, 3)]


def test_results_do_not_change_when_a_step_takes_the_memory() -> None:
    """Arrays that JAX computed or copied from an MpmdArray stay valid when it is donated."""
    step = jaxpp.mpmd_jit_with_loop(lambda x: x * 0, make_mesh(2), donate_argnums=0)
    x = np.arange(4096, dtype=np.float32)
    array = jaxpp.mpmd_jit_with_loop(lambda x: x + 0, make_mesh(2))(x)
    taken = [jax.device_put(array), array.first_mpmd_replica, np.asarray(array), array.copy()]
    zeros = step(array)
    assert array.is_deleted() and not np.any(zeros)
    for before in taken:
        np.testing.assert_array_equal(before, x)


# --- Arrays that cannot be used --------------------------------------------------------

USES: dict[str, Callable[[Any], Any]] = {
    "jnp": jnp.sum,
    "jit": jax.jit(lambda x: x + 1),
    "grad": jax.grad(jnp.sum),
    "vmap": jax.vmap(jnp.sin),
    "operator": lambda x: x + 1,
    "method": lambda x: x.mean(),
    "device_put": jax.device_put,
    "device_get": jax.device_get,
    "closed over": lambda x: jax.jit(lambda y: x + y)(1),
    "global_norm": optax.global_norm,
    "to_bytes": serialization.to_bytes,
    "copy": lambda x: x.copy(),
    "dlpack": jnp.from_dlpack,
}


@pytest.mark.parametrize("use", USES)
def test_a_deleted_array_says_so(use: str) -> None:
    """JaxPP raises its own error, which says what to use instead."""
    for place in WHOLE.values():
        array = place(matrix("float32"))
        array.delete()
        with pytest.raises(jaxpp.JaxppError, match="use what the step returned in its place"):
            USES[use](array)


def test_a_failed_step_is_told_by_whatever_takes_its_result() -> None:
    def broken(x: Any) -> Any:
        raise RuntimeError("no luck")

    def step(x: Any) -> Any:
        return jax.pure_callback(broken, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    # On ranks of several devices, XLA would end the process.
    failing = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}))
    for name, use in USES.items():
        array = failing(jnp.ones((4, 3)))
        with pytest.raises(jaxpp.JaxppError, match="no luck"):
            use(array)
            raise AssertionError(name)


def test_an_array_in_flight_is_waited_for() -> None:
    """JAX is called with a result that the devices have not computed yet."""

    def slow(x: Any) -> Any:
        return jax.lax.fori_loop(0, 400, lambda i, y: jnp.tanh(y @ x), x)

    x = jnp.eye(192) * 0.9
    array = jaxpp.mpmd_jit_with_loop(slow, make_mesh(1))(x)
    np.testing.assert_allclose(jnp.sum(array), jnp.sum(jax.jit(slow)(x)), rtol=1e-4)
    assert array.is_ready()

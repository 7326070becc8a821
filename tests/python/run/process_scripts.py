"""Short programs about signals, forks and exits. test_process.py runs each in its own process.

`python process_scripts.py NAME` runs one of them, which prints what its test expects. Some
intentionally leave threads or processes running at their end.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

jax.config.update("jax_num_cpu_devices", 4)

import jaxpp.api as jaxpp  # noqa: E402

LONG = 3_000_000  # rounds; a step takes about five seconds
SHORT = 10
XS = np.ones((64, 4), np.float32)


def slow(x: jax.Array, rounds: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, rounds, lambda _, x: jnp.sin(x) + 1e-3, x)


def train(w: jax.Array, xs: jax.Array, rounds: jax.Array) -> Any:
    """A step of two stages and 64 microbatches; `rounds` determines how long it takes."""

    def one(x: jax.Array) -> jax.Array:
        x = jaxpp.mark_stage_end(slow(x * w, rounds))
        return jaxpp.mark_stage_end(slow(x * w, rounds)).sum()

    total = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)
    return w + 1e-3 * total, total


def make_step(fun: Callable[..., Any] = train, **options: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",))
    return jaxpp.mpmd_jit_with_loop(fun, jaxpp.MpmdMesh(mesh, "stage"), **options)


def weight() -> Any:
    return np.float32(1)


def interrupt_soon() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


def say(*words: Any) -> None:
    print(*words, flush=True)


# --- Signals ----------------------------------------------------------------------------


def interrupted(**options: Any) -> None:
    """Ctrl-C in a call that waits cancels the step, because its results are unreachable."""
    step = make_step(steps_in_flight=0, **options)
    w, before = step(weight(), XS, SHORT)
    interrupt_soon()
    try:
        step(w, XS, LONG)
    except KeyboardInterrupt:
        say("interrupted")
    try:
        say("weight", float(w) == float(step(weight(), XS, SHORT)[0]))
    except jaxpp.JaxppError as error:
        say(error.code, error)
    try:
        step(w, XS, SHORT)
    except jaxpp.JaxppError as error:
        say(error.code, error)
    say("next", float(step(weight(), XS, SHORT)[1]) == float(before))


def interrupted_with_donation() -> None:
    interrupted(donate_argnums=0)


def interrupted_while_waiting() -> None:
    """Ctrl-C while waiting for a result does not stop the step, and no results are lost."""
    step = make_step(donate_argnums=0)
    w, before = step(weight(), XS, SHORT)
    w, total = step(w, XS, LONG // 3)
    interrupt_soon()
    try:
        float(total)
    except KeyboardInterrupt:
        say("interrupted", total.is_ready())
    say("result", float(total) != 0, float(w) != 1)
    say("next", float(step(weight(), XS, SHORT)[1]) == float(before))


def interrupted_uncaught() -> None:
    step = make_step()
    step(weight(), XS, SHORT)
    interrupt_soon()
    jax.block_until_ready(step(weight(), XS, LONG))


def handler_that_returns() -> None:
    """A user's handler runs once per signal during the step, and the step continues."""
    step = make_step()
    step(weight(), XS, SHORT)
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    alarm = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    alarm.start()
    while not seen:  # the timer may fire between two steps
        jax.block_until_ready(step(weight(), XS, LONG // 15))
    say("seen", len(seen), signal.getsignal(signal.SIGINT) is signal.default_int_handler)


def handler_that_steps() -> None:
    """A handler may call the step for which its thread is waiting."""
    step = make_step()
    total = float(step(weight(), XS, SHORT)[1])
    seen: list[bool] = []

    def handler(number: int, frame: Any) -> None:
        seen.append(float(step(weight(), XS, SHORT)[1]) == total)

    signal.signal(signal.SIGINT, handler)
    interrupt_soon()
    jax.block_until_ready(step(weight(), XS, LONG // 3))
    say("seen", seen)


def interrupted_in_line() -> None:
    """Ctrl-C in a call that waits until an earlier step has finished."""
    step = make_step(steps_in_flight=1)
    step(weight(), XS, SHORT)
    step(weight(), XS, LONG)
    interrupt_soon()
    try:
        step(weight(), XS, SHORT)
    except KeyboardInterrupt:
        say("interrupted")


def interrupted_in_a_callback() -> None:
    """Ctrl-C in a callback, which usually runs on the thread that issues the step."""
    waits = [5.0]

    def wait(value: Any) -> Any:
        if waits:
            interrupt_soon()
            time.sleep(waits.pop())
        return value

    def called_back(w: jax.Array, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> jax.Array:
            x = jax.pure_callback(wait, jax.typeof(x), jaxpp.mark_stage_end(x * w))
            return jaxpp.mark_stage_end(x * w).sum()

        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    try:
        float(make_step(called_back)(weight(), XS))
    except KeyboardInterrupt:
        say("interrupted")
    say("next", float(make_step()(weight(), XS, SHORT)[1]) > 0)


def interrupted_and_forgotten() -> None:
    """Callbacks continue to run after Python has released everything of their step."""
    seen: list[float] = []

    def train_noted(w: jax.Array, xs: jax.Array, rounds: jax.Array) -> Any:
        def one(x: jax.Array) -> jax.Array:
            x = slow(jaxpp.mark_stage_end(slow(x * w, rounds)), 4 * rounds)
            many = jnp.ones((4096, 4)) @ x  # cheap tasks would run while they are issued
            jax.debug.callback(lambda total: seen.append(float(total)), many.sum())
            return jaxpp.mark_stage_end(x).sum()

        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    step = make_step(train_noted)
    step(weight(), XS, SHORT)
    interrupt_soon()
    try:
        jax.block_until_ready(step(weight(), XS, LONG // 3))
    except KeyboardInterrupt:
        say("interrupted")
    before = len(seen)
    del step, train_noted
    gc.collect()
    jax.clear_caches()
    while len(seen) == before:  # on a busy machine, few tasks were issued before Ctrl-C
        time.sleep(0.01)
    say("went on")


def interrupted_compile() -> None:
    """Ctrl-C at various times while a step is traced, planned or compiled. A first step runs
    before that: JAX cannot repeat an interrupted import of an MLIR dialect."""
    make_step()(weight(), XS, SHORT)
    for delay in range(1, 20):
        step = make_step()
        timer = threading.Timer(0.02 * delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            step(weight(), XS, SHORT)
            timer.join()
            time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        timer.join()
    say("done", float(make_step()(weight(), XS, SHORT)[1]) > 0)


# --- Forks ------------------------------------------------------------------------------


def keep_jax_client() -> None:
    """Keeps JAX's client alive. Its destructor joins the parent's threads and crashes in a
    forked child, even without JaxPP."""
    atexit.unregister(jax._src.api.clean_up)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(jax.devices()[0].client))


def outcome_of(child: Callable[[], None]) -> int:
    """Forks a child that exits as programs do; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        child()
        keep_jax_client()
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused(call: Callable[[], Any]) -> None:
    try:
        call()
        say("not refused")
    except jaxpp.JaxppError as error:
        say(error.code, error)


def fork_of_a_user() -> None:
    step = make_step(donate_argnums=0)
    w, total = step(weight(), XS, SHORT)

    def child() -> None:
        refused(lambda: step(w, XS, SHORT))
        refused(lambda: np.asarray(total))
        refused(lambda: make_step()(weight(), XS, SHORT))
        refused(w.block_until_ready)
        w.delete()

    say("child", outcome_of(child))
    say("child", outcome_of(lambda: None))
    say("parent", float(step(w, XS, SHORT)[1]) != float(total))


def fork_during_a_step() -> None:
    step = make_step()
    step(weight(), XS, SHORT)
    thread = threading.Thread(target=step, args=(weight(), XS, LONG // 3))
    thread.start()
    time.sleep(0.2)
    say("child", outcome_of(lambda: refused(lambda: step(weight(), XS, SHORT))))
    thread.join()
    say("parent", float(step(weight(), XS, SHORT)[1]) > 0)


def in_pool(number: int) -> float:
    return float(make_step()(weight(), XS * number, SHORT)[1])


def fork_before_any_client() -> None:
    """JAX has not run anything before the fork either, because it does not survive one."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        totals = pool.map(in_pool, [1, 2])
    say("same", totals == [in_pool(1), in_pool(2)])


def pool_after_use() -> None:
    step = make_step()
    step(weight(), XS, SHORT)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        refused(lambda: pool.map(in_pool, [1]))
    say("parent", float(step(weight(), XS, SHORT)[1]) > 0)


# --- Exits ------------------------------------------------------------------------------


def exit_at_once() -> None:
    """Exits without using the results of steps."""
    step = make_step()
    step(weight(), XS, SHORT)
    step(weight(), XS, LONG // 150)
    sys.exit(3)


def exit_after_interruption() -> None:
    """Exits while the devices are still busy with an interrupted step."""
    step = make_step()
    step(weight(), XS, SHORT)
    interrupt_soon()
    try:
        jax.block_until_ready(step(weight(), XS, LONG))
    except KeyboardInterrupt:
        sys.exit(3)


def step_for_ever(step: Any, rounds: int) -> None:
    while True:
        step(weight(), XS, rounds)


def exit_beside_daemons() -> None:
    """Exits while daemon threads run steps, short ones and a long one."""
    steps = [make_step() for _ in range(3)]
    for step in steps:
        step(weight(), XS, SHORT)
    for step, rounds in zip(steps, (SHORT, LONG // 150, LONG), strict=True):
        threading.Thread(target=step_for_ever, args=(step, rounds), daemon=True).start()
    time.sleep(0.5)
    sys.exit(3)


def error_beside_daemons() -> None:
    step = make_step()
    step(weight(), XS, SHORT)
    threading.Thread(target=step_for_ever, args=(step, SHORT), daemon=True).start()
    time.sleep(0.2)
    raise ValueError("of the user")


LARGE = np.ones((256, 256), np.float32)  # large enough to be shared with JAX
KEPT: list[Any] = []  # until the interpreter exits


def sharing_step() -> Any:
    return make_step(lambda w, x: (w + x, slow(jnp.sum(w * x), 100_000)), donate_argnums=0)


def exit_with_shared_memory() -> None:
    """Exits with JAX arrays in the runtime's memory and unfinished steps on JAX's memory."""
    step = sharing_step()
    w, _ = step(LARGE, jnp.asarray(LARGE))
    for _ in range(3):
        KEPT.append(w.first_mpmd_replica)
        w, total = step(w, jnp.asarray(LARGE))
        KEPT.append(total)
    KEPT.append(jnp.sum(KEPT[0]))
    sys.exit(3)


def shared_memory_outlives_its_owners() -> None:
    """Memory that JAX reads stays valid after array, step, mesh and client are released."""
    from jaxpp.client import devices

    step = sharing_step()
    w, total = step(LARGE, jnp.asarray(LARGE))
    jax.block_until_ready(total)
    seen = [w.first_mpmd_replica, w.addressable_shards[0].data, jax.device_put(w)]
    del step, w, total
    devices._devices.cache_clear()
    devices.client_of.cache_clear()
    jaxpp.MpmdMesh.mesh_stack.clear()
    jax.clear_caches()
    gc.collect()
    say("seen", [float(jnp.sum(one)) == 2.0 * LARGE.size for one in seen])
    while seen:
        seen.pop()
        gc.collect()
    again, _ = sharing_step()(LARGE, jnp.asarray(LARGE))
    say("again", float(again[0, 0]))


def fork_with_shared_memory() -> None:
    """A child releases shared memory, which remains valid in the parent."""
    step = sharing_step()
    w, total = step(LARGE, jnp.asarray(LARGE))
    jax.block_until_ready(total)
    shared = [w.first_mpmd_replica, np.from_dlpack(w.first_mpmd_replica)]
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        del w, shared, total
        gc.collect()
        os._exit(7)
    say("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    w, _ = step(w, jnp.asarray(LARGE))
    say("parent", float(shared[0][0, 0]), float(w[0, 0]))


def exit_with_a_thread() -> None:
    """Python waits at exit for a non-daemon thread, so the thread's step completes."""

    def work() -> None:
        say("total", float(step(weight(), XS, LONG // 15)[1]) > 0)

    step = make_step()
    step(weight(), XS, SHORT)
    threading.Thread(target=work).start()
    sys.exit(3)


if __name__ == "__main__":
    globals()[sys.argv[1]]()

"""Operations after the loop on values of several ranks, and arrays moved to and from ranks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models


def run_on_results(mesh4, after):
    """Runs a forward-only loop with one result per stage, and `after` on the results."""
    params, batch = models.weights(4), models.batch(3)

    def step(params, x):
        def one(mb):
            outs = []
            for p in params:
                mb = jaxpp.mark_stage_end(models.layer(p, mb))
                outs.append(mb.sum(0))
            return outs

        results = jaxpp.treduce(one, x, schedule=jaxpp.GPipe(4), operation=jaxpp.Add)
        return after(results, params)

    ours = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh4)(params, batch["x"])
    return ours, jax.jit(step)(params, batch["x"])


def test_all_reduce_leaves_the_sum_on_every_rank(mesh4):
    ours, plain = run_on_results(mesh4, lambda r, p: jaxpp.cross_mpmd_all_reduce(*r))
    assert ours.mpmd_idxs == (0, 1, 2, 3)
    for replica in ours._partially_addressable_arrays.values():
        np.testing.assert_allclose(replica, plain, rtol=1e-5, atol=1e-6)


def test_stack_is_on_every_rank(mesh4):
    ours, plain = run_on_results(mesh4, lambda r, p: jaxpp.cross_mpmd_stack(r, axis=1))
    assert ours.shape == (16, 4) and ours.mpmd_idxs == (0, 1, 2, 3)
    np.testing.assert_allclose(np.asarray(ours), plain, rtol=1e-5, atol=1e-6)


def test_a_sum_that_a_branch_makes(mesh4):
    def after(results, params):
        total = lambda: jaxpp.cross_mpmd_all_reduce(*results)  # noqa: E731
        return jax.lax.cond(results[0][0] > 1e9, lambda: results[0], total)

    ours, plain = run_on_results(mesh4, after)
    np.testing.assert_allclose(np.asarray(ours), plain, rtol=1e-5, atol=1e-6)


def test_place_with_a_weight_of_another_stage(mesh4):
    ours, plain = run_on_results(mesh4, lambda r, p: jaxpp.place_with(r[0], p[2]["w"]))
    assert ours.mpmd_idxs == (2,)
    np.testing.assert_allclose(np.asarray(ours), plain, rtol=1e-5, atol=1e-6)


def test_a_norm_over_a_stack_of_stages(mesh4):
    ours, plain = run_on_results(mesh4, lambda r, p: jnp.linalg.norm(jnp.stack(r)))
    np.testing.assert_allclose(np.asarray(ours), plain, rtol=1e-5)


def test_reshard_there_and_back(mesh222):
    tree = {
        "a": np.arange(32.0, dtype=np.float32).reshape(4, 8),
        "b": jnp.ones(4, jnp.bfloat16),
    }
    shardings = {
        "a": jaxpp.MpmdSharding(mesh222, (1,), P("data", "model")),
        "b": jaxpp.MpmdSharding(mesh222, (0, 1), P()),
    }
    there = jaxpp.spmd_to_mpmd_reshard(mesh222, tree, shardings)
    assert there["a"].mpmd_idxs == (1,) and there["b"].mpmd_idxs == (0, 1)
    local = there["a"].to_mpmd_local_array
    assert local.sharding.shard_shape(local.shape) == (2, 4)
    big = NamedSharding(mesh222.mesh_of_groups(range(mesh222.mpmd_dim)), P("data"))
    back = jaxpp.mpmd_to_spmd_reshard(mesh222, there, big)
    assert back["a"].sharding == big
    for name, array in tree.items():
        np.testing.assert_array_equal(np.asarray(back[name]), np.asarray(array))

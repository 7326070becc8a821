"""An example of each public name: what docs/api.md shows under it.

One script, which a test runs from top to bottom. `# %% NAME NAME...` begins the example of
these names; `tools/api.py` copies it there.
"""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from jaxpp.experimental import mpmd

jax.config.update("jax_num_cpu_devices", 8)

STAGES, MICROBATCHES, D = 4, 8, 16
keys = jax.random.split(jax.random.key(0), STAGES)
params = [jax.random.normal(k, (D, D)) / D**0.5 for k in keys]
batch = np.random.default_rng(0).normal(size=(MICROBATCHES, 4, D)).astype(np.float32)
optimizer = optax.adam(1e-3)

# %% MpmdMesh
devices = np.array(jax.devices()).reshape(4, 2)
mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data")), "stage")
print(mesh.mpmd_dim, "ranks of", mesh.unstack[0].size, "devices")

one_device = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("stage",))
shared = jaxpp.MpmdMesh(one_device, "stage", ranks_per_device=4)  # four ranks on it

# %% MpmdSharding
sharding = jaxpp.MpmdSharding(mesh, {0, 3}, P("data"))  # a copy on two ranks, each in halves
x = jax.device_put(np.ones((8, D)), sharding)
print(sharding.mesh_ids, sharding.rank_sharding(3).spec, len(x.addressable_shards))

# %% RemoteMpmdMesh
def on_ray() -> None:
    """Ranks in workers that Ray starts; the step and what calls it stay as they are."""
    with jaxpp.RemoteMpmdMesh(4, (1,), ("data",)) as remote:
        step = jaxpp.mpmd_jit_with_loop(train_step, remote, donate_argnums=(0, 1))
        step(params, optimizer.init(params), batch)

# %% mark_stage_end pipeline_enter_stage
def loss_fn(params, x):
    for w in params:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
    return jnp.mean(x**2)

# %% stages auto_stages
def layers_loss(params, x):
    """The same marks, set by the number of stages."""
    x = jaxpp.stages(lambda w, x: jnp.tanh(x @ w), params, x, STAGES)
    return jnp.mean(x**2)

def unmarked_loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

found_loss = jaxpp.auto_stages(unmarked_loss, STAGES)  # marks where the work is equal
assert layers_loss(params, batch[0]) == found_loss(params, batch[0])

# %% treduce mpmd_jit_with_loop
def train_step(params, opt_state, batch):
    def one(microbatch):
        return jax.value_and_grad(loss_fn)(params, microbatch)

    losses, grads = jaxpp.treduce(
        one, batch, jaxpp.Std1F1B(STAGES), operation=(jaxpp.Concat(), jaxpp.Add)
    )
    grads = jax.tree.map(lambda g: g / MICROBATCHES, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, losses.mean()

step = jaxpp.mpmd_jit_with_loop(
    train_step, mpmd_mesh=mesh, in_specs=(P(), None, P(None, "data")), donate_argnums=(0, 1)
)
opt_state = optimizer.init(params)
params, opt_state, loss = step(params, opt_state, batch)
print(float(loss), params[2].mpmd_idxs)

# %% treduce_i Add Concat Max
def statistics(params, batch):
    def one(i):  # from the number of the microbatch
        loss = loss_fn(params, batch[i])
        return {"sum": loss, "each": loss, "largest": loss}

    how = {"sum": jaxpp.Add, "each": jaxpp.Concat(0), "largest": jaxpp.Max}
    return jaxpp.treduce_i(one, MICROBATCHES, jaxpp.GPipe(STAGES), operation=how)

found = jaxpp.mpmd_jit_with_loop(statistics, mesh)(params, batch)
assert float(found["largest"]) == float(found["each"].max())

# %% Operation
class MeanOfSquares:
    """One of a user's own: a state, and how a value changes it."""

    def state(self, n, value):
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state, value, i):
        return state + value**2 / MICROBATCHES

def second_moment(params, batch):
    one = lambda microbatch: loss_fn(params, microbatch)
    return jaxpp.treduce(one, batch, jaxpp.GPipe(STAGES), operation=MeanOfSquares())

print(float(jaxpp.mpmd_jit_with_loop(second_moment, mesh)(params, batch)))

# %% MpmdFunction TracedStep LoweredStep CompiledStep
lowered = step.lower(params, opt_state, batch)  # planned and proved; nothing is compiled
print(lowered.as_text()[:60], lowered.out_shardings[2])
for rank in lowered.plan.plan.summary():  # the peak memory of each rank, in bytes
    print(rank.peak_bytes)
compiled = lowered.compile()
compiled.set_tracing()
params, opt_state, loss = compiled(params, opt_state, batch)
print(compiled.draw_trace(60))

# %% CostSummary RankCost LinkCost CollectiveCost
costs = compiled.cost_summary()
print(costs)  # as tables
print(costs.ranks[0].peak_bytes, [link.bytes for link in costs.links])
print([(c.task, c.kind, c.axes, c.times) for c in costs.collectives])  # on several devices

# %% MemoryAnalysis
memory = compiled.memory_analysis()  # of the device that needs most
print(memory.peak_memory_in_bytes, memory.temp_size_in_bytes)

# %% Prediction
prediction = compiled.predict()  # from the call that was traced above
print(prediction)  # as a table
print(prediction.makespan, compiled.predict(cores=0).makespan)  # here, and on free cores

# %% mpmd_jit_by_yield
@jaxpp.mpmd_jit_by_yield(mpmd_mesh=mesh)
def evaluate(params, x):
    return loss_fn(params, x)

print(float(evaluate(params, batch[0])))

# %% mpmd_jit_rev
@jaxpp.mpmd_jit_rev(mpmd_mesh=mesh, out_refs=({0}, {0, 1}))
def create(key):
    up, down = jax.random.split(key)
    return jax.random.normal(up, (8, 32)), jax.random.normal(down, (32, 8))

print([w.mpmd_idxs for w in create(jax.random.key(0))])

# %% mpmd task transfer Transfer stack slice LoweredMpmdFun
rows = [jax.sharding.NamedSharding(m, P("data")) for m in mesh.unstack]
both = jax.sharding.NamedSharding(mesh.mpmd_submesh([0, 1]).jax_mesh, P())

@mpmd.mpmd(mesh, in_shardings=(rows[0],))
def by_hand(x):
    y = mpmd.task(jnp.tanh, out_shardings=rows[0])(x)
    future = mpmd.transfer(y, out_shardings=rows[1])  # a Transfer, which sends now
    z = mpmd.task(jnp.exp, out_shardings=rows[1])(future.done())
    stacked = mpmd.stack(y, z)  # the rows of both ranks, without moving any
    total = mpmd.task(jnp.sum, out_shardings=both)(stacked)  # on each of them
    return mpmd.slice(total, [0, 1])

lowered = by_hand.lower(batch[0])  # planned and proved
print(lowered.local_jaxprs[0])
print(lowered(batch[0]))

# %% GPipe Std1F1B Eager1F1B ZeroBubble ZeroBubbleH2
# A stage on each rank; what the first one does at first.
for kind in (
    jaxpp.GPipe, jaxpp.Std1F1B, jaxpp.Eager1F1B, jaxpp.ZeroBubble, jaxpp.ZeroBubbleH2
):
    print(kind.__name__, *map(str, kind(num_stages=4).tasks(MICROBATCHES)[0][:6]))

# %% Interleaved1F1B InterleavedGPipe InterleavedZeroBubble BreadthFirst KimiK2
# Stage s on rank s mod ranks: eight stages on four ranks.
for kind in (
    jaxpp.Interleaved1F1B, jaxpp.InterleavedGPipe, jaxpp.InterleavedZeroBubble,
    jaxpp.BreadthFirst, jaxpp.KimiK2,
):
    schedule = kind(num_stages=8, mpmd_dim=4)
    print(kind.__name__, *map(str, schedule.tasks(MICROBATCHES)[0][:6]))

# %% V1F1B VHalf VMin ZeroBubbleV DualPipeV
# Rank r runs stage r and the one as far from the end: eight stages on four ranks.
for kind in (jaxpp.V1F1B, jaxpp.VHalf, jaxpp.VMin, jaxpp.ZeroBubbleV, jaxpp.DualPipeV):
    schedule = kind(num_stages=8, mpmd_dim=4)
    print(kind.__name__, *map(str, schedule.tasks(MICROBATCHES)[0][:6]))

# %% BaseSchedule InterleavedBaseSchedule Task FusedTask TaskType
class AllThenBack(jaxpp.BaseSchedule):
    """A schedule of one's own: every stage takes all forwards, then all backwards."""

    def tasks(self, n_mubatches):
        rows = []
        for stage in range(self.num_stages):
            forward = [jaxpp.Task(stage, i, jaxpp.TaskType.FWD) for i in range(n_mubatches)]
            backward = [jaxpp.Task(stage, i, jaxpp.TaskType.BWD) for i in range(n_mubatches)]
            rows.append(forward + backward)
        return rows

AllThenBack(4).build(MICROBATCHES, mpmd_dim=4)  # proves it; a step does so, too
print(jaxpp.FusedTask([jaxpp.Task(3, 0, jaxpp.TaskType.FWD),
                       jaxpp.Task(3, 0, jaxpp.TaskType.BWD)]))

# %% CsvSchedule
with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    file.write("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")  # a row a rank
    file.flush()
    print(jaxpp.CsvSchedule(file.name).build(2, mpmd_dim=2).text())

# %% Searched
uneven = [(1, 1, 1), (1, 1, 1), (3, 3, 3), (1, 1, 1)]  # forward, input and weight gradient
print(jaxpp.Searched(uneven, mpmd_dim=4, seconds=0.2).build(MICROBATCHES, mpmd_dim=4).text())

# %% Auto
def searched_step(params, batch):
    one = lambda microbatch: jax.value_and_grad(loss_fn)(params, microbatch)
    return jaxpp.treduce(one, batch, auto, operation=jaxpp.Add)

auto = jaxpp.Auto(memory_limit=50_000_000, seconds=0.2)  # measures the stages, then searches
jaxpp.mpmd_jit_with_loop(searched_step, mesh)(params, batch)
print(auto.found)

# %% MpmdArray ArrayRef
weight = params[1]  # an array of rank 1, and a jax.Array for all of JAX
print(weight.mpmd_idxs, weight.sharding.spec, float(jnp.linalg.norm(weight)))
print(np.asarray(weight).shape, [shard.device for shard in weight.addressable_shards])

copies = [jax.device_put(np.ones(4, np.float32), sharding.rank_sharding(r)) for r in (0, 3)]
made = jaxpp.MpmdArray(copies, sharding)  # of arrays that lie on the ranks already

# %% cross_mpmd_all_reduce cross_mpmd_stack place_with
def norms(params, batch):
    one = lambda microbatch: jax.grad(loss_fn)(params, microbatch)
    grads = jaxpp.treduce(one, batch, jaxpp.GPipe(STAGES), operation=jaxpp.Add)
    squares = [jnp.sum(g**2) for g in grads]  # each on the rank of its weight
    total = jaxpp.cross_mpmd_all_reduce(*squares)  # on all ranks
    return total, jaxpp.cross_mpmd_stack(squares), jaxpp.place_with(squares[0], params[3])

total, each, moved = jaxpp.mpmd_jit_with_loop(norms, mesh)(params, batch)
print(total.mpmd_idxs, each.shape, moved.mpmd_idxs)

# %% load LoadedStep
with tempfile.TemporaryDirectory() as folder:
    compiled.save(f"{folder}/step.plan")
    loaded = jaxpp.load(f"{folder}/step.plan", mpmd_mesh=mesh)  # without the model's code
    params, opt_state, loss = loaded(params, opt_state, batch)

# %% spmd_to_mpmd_reshard mpmd_to_spmd_reshard
where = [jaxpp.MpmdSharding(mesh, {rank}, P("data")) for rank in range(STAGES)]
placed = jaxpp.spmd_to_mpmd_reshard(mesh, [np.asarray(w) for w in params], where)
everywhere = jax.sharding.NamedSharding(mesh.jax_mesh, P())
back = jaxpp.mpmd_to_spmd_reshard(mesh, placed, everywhere)
assert all((a == b).all() for a, b in zip(back, params, strict=True))

# %% collect_task_times_ms
with jaxpp.collect_task_times_ms() as times:
    params, opt_state, loss = step(params, opt_state, batch)
    jax.block_until_ready(loss)
print({task: sum(ms) / len(ms) for task, ms in times.items() if task.startswith("fwd")})

# %% JaxppError JaxppTypeError JaxppValueError
try:
    jaxpp.Std1F1B(0)
except jaxpp.JaxppError as error:  # also a ValueError, as for any wrong argument
    print(error.code, "|", error)
    assert isinstance(error, ValueError)

# %% NanError
with jax.debug_nans(True):
    try:
        jax.block_until_ready(evaluate(params, batch[0] * np.nan))
    except jaxpp.NanError as error:
        print(error)

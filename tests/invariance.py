"""One update of one batch, on one device and over meshes and processes; run by test_invariance.

  python -m tests.invariance meshes FOLDER                8 devices; prints a report, and writes alone.npz: of one device
  python -m tests.invariance process FOLDER INDEX PORT    one of 2 processes with 4 devices each; writes processes.npz

A report is {case: {name of a metric or of a leaf of the state: its largest error over the largest value there}}.
"""

import json
import sys
from concurrent import futures
from pathlib import Path

import jax
import numpy as np

from sao_jax import batching, build, sharding
from sao_jax.runtime.peers import Peers
from sao_jax.types import StopReason, Trajectory
from tests.learner_oracle import quick
from tests.test_build import config

ROWS, LENGTH, VERSION = 16, 64, 9
PATIENCE_S = 600  # a tenth of it does on two idle cores
SIZES = {
  'model__width': 32,
  'model__num_heads': 4,
  'model__num_kv_heads': 2,
  'model__head_dim': 8,
  'model__mlp_width': 32,
  'model__attention_chunk': 16,
  'env__max_tokens': LENGTH,
  'engine__prefill_buckets': (8,),
  'supervised__num_steps': 0,
  'evaluation__num_problems': 1,
  'train__micro_rows': 8,
  'train__logprob_chunk': 64,
  'sao__policy_freeze_steps': 0,
  'sao__discount': 0.97,
  'sao__critic_lambda': 0.9,
  'sao__bootstrap_truncated': True,
  'runtime__max_staleness': 2,
}
# A first step of Adam with eps = 1 is g / (|g| + 1), and its first moment is 0.1 g: no division by small numbers.
SLOW = {'learning_rate': 0.1, 'warmup_steps': 0, 'eps': 1.0, 'clip_norm': float('inf')}
DENSE = {
  **SIZES,
  **{f'{network}__{name}': x for network in ('policy', 'critic') for name, x in SLOW.items()},
}
MOE = {
  **DENSE,
  'model__num_experts': 4,
  'model__experts_per_token': 2,
  'model__expert_backend': 'ragged',
  'model__num_kv_heads': 4,
}
LORA = {**DENSE, 'model__lora_rank': 2, 'model__lora_alpha': 2.0, 'critic__frozen': ()}
BASES = {'dense': DENSE, 'moe': MOE, 'lora': LORA}


def mesh(**sizes):
  return {f'mesh__{axis}': size for axis, size in sizes.items()}


CUT = mesh(data=2, fsdp=2, tensor=2)
CASES = {  # name: (what it must equal, changes); the bases first
  'dense': ('dense', {}),
  'moe': ('moe', {}),
  'lora': ('lora', {}),
  'micro-batches of 2 rows': ('dense', {'train__micro_rows': 2}),
  'data 8, micro-batches of 16 rows': ('dense', {**mesh(data=8), 'train__micro_rows': 16}),
  'fsdp 8': ('dense', mesh(fsdp=8)),
  'data 2, fsdp 4, optimisers on the host': (
    'dense',
    {**mesh(data=2, fsdp=4), 'train__optimizer_memory': 'pinned_host'},
  ),
  'data 2, fsdp 2, tensor 2, remat': ('dense', {**CUT, 'model__remat': 'nothing_saveable'}),
  'tensor 2, sequence 2, fsdp 2': ('dense', mesh(tensor=2, sequence=2, fsdp=2)),
  'sequence 8, chunked, remat': (
    'dense',
    {**mesh(sequence=8), 'model__attention': 'chunked', 'model__remat': 'dots_saveable'},
  ),
  'expert 4, data 2, every expert on every token': (
    'moe',
    {**mesh(expert=4, data=2), 'model__expert_backend': 'dense'},
  ),
  'expert 2, tensor 2, fsdp 2, in blocks': (
    'moe',
    {**mesh(expert=2, tensor=2, fsdp=2), 'model__expert_backend': 'blocked'},
  ),
  'lora, data 2, fsdp 2, tensor 2': ('lora', CUT),
  'bfloat16 sums, data 2': ('dense', {**mesh(data=2), 'train__compression': 'bfloat16'}),
  'int8 sums, data 2, fsdp 2, tensor 2': ('dense', {**CUT, 'train__compression': 'int8'}),
}


def trajectories():
  """Prompt, then actions with observations between them; some truncated, some tokens too old, ratios of every size."""
  rng = np.random.default_rng(0)
  found = []
  for i in range(14):
    n = int(rng.integers(8, 40))
    mask = rng.random(n) < 0.6
    mask[:3], mask[-2] = False, True
    rewards = np.zeros(n, np.float32)
    rewards[np.flatnonzero(mask)[-1]] = rng.normal()
    found.append(
      Trajectory(
        episode=f'e{i}',
        prompt_id=f'p{i}',
        group=f'e{i}',
        tokens=rng.integers(0, 256, n).astype(np.int32),
        mask=mask,
        behavior_logprobs=np.where(mask, -5.5 + rng.normal(size=n), 0)
        .clip(max=0)
        .astype(np.float32),
        versions=np.where(mask, rng.integers(VERSION - 4, VERSION + 1, n), -1).astype(np.int32),
        rewards=rewards,
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        terminated=i % 3 > 0,
        truncated=i % 3 == 0,
        stop_reason=StopReason.ANSWERED,
      )
    )
  return found


def packed(groups):
  """One batch of ROWS rows; trajectories of different groups never share a row."""
  numbers = {'row_length': LENGTH, 'row_multiple': 1, 'version': VERSION, 'max_staleness': 2}
  batches = [batching.pack(group, **numbers) for group in groups]

  def join(*leaves):
    rows = np.concatenate(leaves)
    return np.pad(rows, ((0, ROWS - len(rows)), (0, 0)))

  return jax.tree.map(join, *batches)


def parts_of(base, changes):
  return build.parts(config(**BASES[base] | changes))


def start(parts):
  """(base, policy, critic) on the host. Nothing is 0 that would hide a gradient: neither adapters nor the value head."""
  rng = np.random.default_rng(1)

  def draw(keys, x):
    scale = sharding.path_of(keys).endswith('scale')
    return (scale + 0.15 * rng.normal(size=x.shape)).astype(np.float32)

  state = parts.state
  return jax.tree.map_with_path(draw, (state.base, state.policy, state.critic))


def build_case(name):
  base, changes = CASES[name]
  return build.parts(config(**BASES[base] | changes))


def compiled(parts, batch):
  rows = None if parts.model.mesh is None else sharding.rows(parts.model.mesh, 2)
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
  lowered = parts.learner.update.lower(parts.state, jax.tree.map(shape, batch))
  return lowered.compile(compiler_options=quick())


def updated(parts, update, batch):
  """{path: array on the host} of state and metrics after one update, but for what compressed sums owe."""
  state = parts.placed(parts.init_state(*start(parts)))
  state, metrics = update(state, parts.model.place(batch))
  tree = state.replace(errors=()), metrics
  if jax.process_count() > 1:
    tree = jax.jit(lambda x: x, out_shardings=sharding.everywhere(parts.model.mesh))(tree)
  return {sharding.path_of(keys): np.asarray(x) for keys, x in jax.tree.leaves_with_path(tree)}


def errors(got, expected):
  assert got.keys() == expected.keys(), set(got) ^ set(expected)
  report = {}
  for name, x in expected.items():
    assert (got[name].shape, got[name].dtype) == (x.shape, x.dtype), name
    difference = np.abs(np.float64(got[name]) - x).max(initial=0)
    report[name] = float(difference / max(np.abs(x).max(initial=0), 1e-4))
  return report


def meshes(folder):
  """Programs are compiled by two threads, and run one after the other: their collectives must not cross."""
  batch = packed([trajectories()])
  with futures.ThreadPoolExecutor(2) as pool:
    parts = {name: build_case(name) for name in CASES}
    updates = {name: pool.submit(compiled, parts[name], batch) for name in CASES}
    got = {name: updated(parts[name], updates[name].result(), batch) for name in CASES}
  one_a_row = packed([[t] for t in trajectories()])
  got['one trajectory a row'] = updated(parts['dense'], updates['dense'].result(), one_a_row)
  np.savez(folder / 'alone.npz', **got['dense'])
  bases = {name: base for name, (base, _) in CASES.items()}
  return {name: errors(x, got[bases.get(name, 'dense')]) for name, x in got.items()}


def process(folder, index, port):
  """One of 2: the mesh of 8 devices spans both, rows and kernels cross the border."""
  jax.distributed.initialize(f'127.0.0.1:{port}', 2, index, initialization_timeout=300)
  batch, parts = packed([trajectories()]), build_case('data 2, fsdp 2, tensor 2, remat')
  # Collectives wait for each other half a minute only, and a busy machine compiles for longer.
  update = Peers(PATIENCE_S).each(lambda: compiled(parts, batch))
  got = updated(parts, update, batch)
  if index == 0:
    np.savez(folder / 'processes.npz', **got)


if __name__ == '__main__':
  what, folder, *rest = sys.argv[1:]
  if what == 'meshes':
    print(json.dumps(meshes(Path(folder))))
  else:
    process(Path(folder), *map(int, rest))

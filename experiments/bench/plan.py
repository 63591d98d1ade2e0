"""How near is experiments/plan.py? Plans a few runs, does what they do, and measures the memory of the process.

  python experiments/bench/plan.py [--output=docs/plan.md] [--cases='MODEL@DEVICES;...']

Each case has a process of its own: warm-up, then state, engines, an update, publication. About 40 minutes on two CPU cores, most of it compilation; at
most 8 GB at once.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / 'experiments'), str(ROOT / 'configs')]
import commands  # noqa: E402

SMOL = {
  'vocab_size': 49_152,
  'width': 576,
  'num_layers': 30,
  'num_heads': 9,
  'num_kv_heads': 3,
  'head_dim': 64,
  'mlp_width': 1536,
  'qk_norm': False,
  'remat': 'nothing_saveable',
}
DENSE = {
  'vocab_size': 32_768,
  'width': 768,
  'num_layers': 8,
  'num_heads': 12,
  'num_kv_heads': 4,
  'head_dim': 64,
  'mlp_width': 2304,
}
MIXTURE = {
  'vocab_size': 16_384,
  'width': 512,
  'num_layers': 6,
  'num_heads': 8,
  'num_kv_heads': 4,
  'head_dim': 64,
  'mlp_width': 512,
  'num_experts': 16,
  'experts_per_token': 2,
  'expert_backend': 'blocked',
  'tied': False,
}
MODELS = {
  'SmolLM2-135M': SMOL,
  'SmolLM2-135M, LoRA 16': {**SMOL, 'lora_rank': 16, 'remat': 'none'},
  'dense, 81M': DENSE,
  'mixture, 99M': {**MIXTURE, 'remat': 'nothing_saveable'},
}
WHOLE = 'SmolLM2-135M'  # on one device only: on four it would take 10 GB
CASES = [
  (model, devices) for model in MODELS for devices in (1, 4) if (model, devices) != (WHOLE, 4)
]
ROWS, LENGTH, BATCH = 4, 256, 8  # of a micro-batch, of a row, of an update
SLOTS, PREFILL_ROWS, BUCKET = 8, 4, 32


class Found(NamedTuple):
  """Of one case."""

  parameters: int  # of the policy's model
  planned: int  # bytes of all devices together
  measured: int
  planned_update: int  # temporaries of an update, bytes of one device
  compiled_update: int


def config_of(model: str, devices: int):
  import beyondaime

  c = beyondaime.get_config().unlock()
  c.model.update(MODELS[model])
  c.mesh.fsdp = devices
  c.supervised.num_steps = 0
  c.env.max_tokens = LENGTH
  c.train.batch_size, c.train.micro_rows = BATCH, ROWS
  c.engine.num_slots, c.engine.prefill_rows = SLOTS, PREFILL_ROWS
  c.engine.prefill_buckets = (BUCKET,)
  return c.lock()


def planned(parts, devices: int) -> tuple[int, int]:
  """(of all devices together, where the engines stand on one of them; temporaries of an update on one device)."""
  from sao_jax.build import plan

  learner = plan.of_learner(parts)
  phases = learner.held, learner.update, learner.publish
  everywhere = plan.Plan(*({name: devices * size for name, size in x.items()} for x in phases))
  return plan.together(everywhere, plan.of_engine(parts)).total, sum(learner.update.values())


def measured(parts) -> tuple[int, int]:
  """(what the process grows by at most, from when everything is compiled; temporaries that the compiler plans)."""
  from sao_jax import build

  batch = _batch()
  update = parts.learner.update.lower(parts.state, batch).compile()
  programs = build.programs_of(parts)
  _lap(parts, update, programs, batch)  # compiles the small functions
  gc.collect()
  ctypes.CDLL('libc.so.6').malloc_trim(0)
  before = _memory('VmRSS')
  Path('/proc/self/clear_refs').write_text('5')  # the peak starts anew
  _lap(parts, update, programs, batch)
  return _memory('VmHWM') - before, update.memory_analysis().temp_size_in_bytes


def _lap(parts, update, programs, batch) -> None:
  """What is alive in a run, at its fullest: two engines, a policy that has arrived beside the one in use, an update, the next policy."""
  import jax

  from sao_jax import pretraining

  def export(state):
    there = jax.tree.map(lambda x: x.sharding, programs.params)
    return jax.block_until_ready(jax.device_put(parts.model.export(state), there))

  state = pretraining.fresh_state(parts, parts.model.init(0))
  in_use, evaluated, arrived = (export(state) for _ in range(3))
  caches = [_round(programs, weights, programs.init_state()) for weights in (in_use, evaluated)]
  state, _ = jax.block_until_ready(update(state, parts.model.place(batch)))
  in_use, arrived = arrived, export(state)
  for weights, cache in zip((in_use, evaluated), caches, strict=True):
    _round(programs, weights, cache)


def _round(programs, weights, state):
  """A prefill and a decode."""
  import jax

  from sao_jax.engines.programs import empty_rows

  rows = empty_rows(SLOTS, PREFILL_ROWS, BUCKET)._replace(
    slots=np.arange(PREFILL_ROWS, dtype=np.int32),
    counts=np.full(PREFILL_ROWS, BUCKET, np.int32),
    last=np.ones(PREFILL_ROWS, bool),
    remaining=np.full(PREFILL_ROWS, LENGTH - BUCKET, np.int32),
  )
  state, _ = programs.prefill[BUCKET](weights, state, rows)
  state, _ = programs.decode(weights, state, np.ones(SLOTS, bool))
  return jax.block_until_ready(state)


def _batch():
  """Full rows, half of them actions."""
  from sao_jax.types import Batch

  shape = BATCH, LENGTH
  arrays = {name: np.zeros(shape, np.float32) for name in Batch.__dataclass_fields__}
  action = np.tile(np.arange(LENGTH) >= LENGTH // 2, (BATCH, 1)).astype(np.float32)
  arrays |= {
    'tokens': np.random.default_rng(0).integers(0, 256, shape, np.int32),
    'positions': np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1)),
    'segment_ids': np.ones(shape, np.int32),
    'action_mask': action,
    'mask': action,
    'num_actions': np.full(shape, LENGTH // 2, np.float32),
    'behavior_logprobs': -10 * action,
  }
  return Batch(**arrays)


def _memory(name: str) -> int:
  """VmRSS or VmHWM of this process, bytes."""
  line = next(x for x in Path('/proc/self/status').read_text().splitlines() if x.startswith(name))
  return 1024 * int(line.split()[1])


def one(model: str, devices: int) -> Found:
  import jax

  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', devices)
  from sao_jax import build

  parts = build.parts(config_of(model, devices))
  trees = parts.state.base, parts.state.policy
  parameters = sum(x.size for x in jax.tree.leaves(trees))
  (total, temporaries), (grown, compiled) = planned(parts, devices), measured(parts)
  return Found(parameters, total, grown, temporaries, compiled)


def make_table(found: dict[tuple[str, int], Found]) -> str:
  lines = [
    '| model | parameters | devices | planned, MB | measured, MB | planned / measured | an update: planned, MB | compiled, MB | planned / compiled |',
    '|---|' + '--:|' * 8,
  ]
  for (model, devices), x in found.items():
    numbers = [f'{x.parameters / 1e6:,.1f} M', str(devices)]
    for ours, theirs in ((x.planned, x.measured), (x.planned_update, x.compiled_update)):
      numbers += [f'{ours / 1e6:,.0f}', f'{theirs / 1e6:,.0f}', f'{ours / theirs:.2f}']
    lines.append(f'| {model} | {" | ".join(numbers)} |')
  return '\n'.join(lines)


def make_report(found: dict[tuple[str, int], Found]) -> str:
  import jax
  import jaxlib

  from sao_jax.build import plan

  worst = max((abs(x.planned / x.measured - 1), case) for case, x in found.items())
  return f"""# How near the memory plan is

    python experiments/bench/plan.py --output=docs/plan.md

JAX {jax.__version__}, jaxlib {jaxlib.__version__}, on CPU devices; MB are powers of ten. `experiments/plan.py` tells what the fullest device of a run holds, and refuses what
does not fit. `experiments/run.py` does the same before it starts, with the memory that the devices have.

## Planned and measured

{make_table(found)}

Each row is a process of its own. It compiles everything, does a warm-up, gives back what it can, and then does what a run does at its fullest: policy
and critic with AdamW, two engines with their caches, the policy that has just arrived beside the one that still samples, one update (two critic steps, advantages,
one policy step, {BATCH} rows of {LENGTH} tokens, {ROWS} at a time), the export of the next policy. *Measured* is the highest resident memory of the process less what it had before the
arrays were made: code, JAX and compiled programs (0.5 to 1 GB) are not in it, and freed memory goes back to the machine (MALLOC_MMAP_THRESHOLD_; by default glibc
keeps freed arrays below 32 MB, which cost a further 9 % where it was looked at). *Planned* is the sum over the devices, which share the process. The
farthest is {worst[1][0]} on {worst[1][1]} device(s), by {worst[0]:.0%}. *Compiled* is what XLA says of the temporaries of the update on one device.

## What is counted, and how

- **Exact**: parameters, optimisers, frozen backbone, errors of compressed sums, weights and caches of the engines. These are shapes, cut as
  `sao_jax/sharding.py` says. Three copies of the engine's weights: in use, arriving, and those of the evaluation; a fourth while an evaluation starts.
  Optimiser states in `pinned_host` count in an update only, which fetches them.
- **Traced**: the activations of a micro-batch are the arrays that JAX itself hands from the forward to the backward pass under the remat policy, of a decoder with the
  heads, widths, experts, rows and positions of one device.
- **By formula**: gradients (a micro-batch's and their sum, float32); the state before the update, which comes back if something is not finite (critic and its AdamW; of the policy
  only with several minibatches); one layer of the backward pass ({plan.LAYER} times what JAX saves of it without remat); with `fsdp` the gathered kernels of a layer; a chunk of logits four times; in the engine the
  rows of the cache that a prefill copies, scores and logits.
- **Not counted**: the warm start of the small models that have one; what the *host* holds (with `runtime.record` a digest brings policy and critic there at every update); the allocator's
  fragments. By default XLA takes three quarters of a GPU: raise XLA_PYTHON_CLIENT_MEM_FRACTION, or plan with that much. A plan that leaves less than 5 % on one device, or
  15 % on a mesh, is not safe: collectives hold what is not counted.

## Which numbers to trust

The sums are never the compiler's. For shapes like these XLA for CPUs plans nearly the same (last columns), and `--compile` shows it for any config; but for large models that takes
minutes, it is the plan of another compiler than that of the accelerator, products of experts (`ragged`) and bfloat16 are lowered otherwise there, and a run must
be refused in a second. The formulas err by what a compiler fuses or keeps, as the columns tell. No plan was compared with an accelerator.
"""


def main(argv: Sequence[str]) -> None:
  with commands.input_errors():
    values = commands.parse(argv, _define)
    names = [f'{model}@{devices}' for model, devices in CASES]
    wanted = values.cases.split(';') if values.cases else names
    if unknown := set(wanted) - set(names):
      raise ValueError(f'--cases: {unknown.pop()!r} is none of {"; ".join(names)}')
  if values.alone:
    model, _, devices = values.alone.partition('@')
    print(json.dumps(one(model, int(devices))))
    return
  found = {}
  for name in wanted:
    child = [sys.executable, __file__, f'--alone={name}']
    # What is freed goes back to the machine: by default glibc keeps what was smaller than 32 MB for later.
    environment = {**os.environ, 'MALLOC_MMAP_THRESHOLD_': str(2**16)}
    done = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    line = done.stdout
    model, _, devices = name.partition('@')
    found[model, int(devices)] = Found(*json.loads(line.splitlines()[-1]))
    print(name, found[model, int(devices)], file=sys.stderr, flush=True)
  report = make_report(found)
  if values.output:
    Path(values.output).write_text(report, encoding='utf-8')
  else:
    print(report)


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('output', '', 'File that is written; empty: prints it.', flag_values=values)
  flags.DEFINE_string('cases', '', 'MODEL@DEVICES;...; empty: all.', flag_values=values)
  flags.DEFINE_string('alone', '', 'One case, in this process.', flag_values=values)


if __name__ == '__main__':
  commands.run(main, resumable=False)

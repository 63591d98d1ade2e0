"""Qwen3 under SAO, on integer-answer mathematics with a Python tool. None of this was run here: it is planned.

  python experiments/run.py --config=configs/qwen3.py              Qwen3-0.6B, all weights of policy and critic, one GPU of 80 GiB
  python experiments/run.py --config=configs/qwen3.py:1.7b         Qwen3-1.7B, adapters of rank 32 on one backbone, one GPU of 80 GiB
  python experiments/run.py --config=configs/qwen3.py:30b          Qwen3-30B-A3B-Thinking-2507 at the paper's numbers, 64 GPUs of 140 GiB
  python experiments/plan.py --config=configs/qwen3.py:30b --devices=64x140GiB      what each of them holds, before anything is downloaded

Each wants the published Hugging Face folder (weights, config.json, tokenizer.json) at `model.weights`; 30b also wants the problems of
`data.path`. GiB of the fullest device, by that command:

                                         0.6b     1.7b      30b
  parameters of policy and critic         4.4      0.3      7.2
  frozen backbone                           -      6.4        -
  optimisers of policy and critic         7.6      0.4     14.2
  batch                                   0.0      0.0      0.1
  engine weights, three copies            4.2     11.5     23.4
  KV caches of two engines               28.0     28.0     12.0
  work of the engines                     5.5      5.5     11.5
  an update: state before it              5.3      0.3     10.6
             gradients                    4.4      0.3      7.2
             experts in another layout      -        -      3.4
             activations                  0.3      0.5     13.5
             logits; of 30b, one layer    5.3      4.7     13.0
  sum                                    65.1     58.0    116.1

An XLA process takes three quarters of a GPU by default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. What to expect, if it learns as the
paper's does: BeyondAIME pass@1 from 53 to 75 % for 30b in several hundred updates; for the small ones nobody knows.
The four slots of 128k tokens that 30b has room for make it slow, and its deadlines long: the rollouts of a real run belong on engines of their own.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

VARIANTS = ('0.6b', '1.7b', '30b')


def get_config(variant: str = '0.6b') -> ConfigDict:
  """A diff on configs/beyondaime.py:paper, for its numbers of the method."""
  if variant not in VARIANTS:
    raise ValueError(f'variant {variant!r} is unknown: choose one of {", ".join(VARIANTS)}')
  get_base = runpy.run_path(str(Path(__file__).with_name('beyondaime.py')))['get_config']
  c = get_base('paper').unlock()
  c.variant = variant
  c.chat.format = 'qwen3'
  c.model.vocab_size = 151936
  c.model.head_dim = 128
  c.model.norm_eps = 1e-6
  c.model.qk_norm = True
  c.model.attention = 'chunked'  # 'cudnn' needs a mask of T x T, 'pallas' was not run
  c.model.attention_chunk = 1024
  c.model.dtype = 'bfloat16'
  c.model.remat = 'nothing_saveable'
  c.train.logprob_chunk = 2048  # of 151,936 logits each, over all devices
  c.runtime.record = False  # a digest brings all parameters to the host
  {'0.6b': _small, '1.7b': _middle, '30b': _large}[variant](c)
  return c.lock()


def _one_gpu(c: ConfigDict) -> None:
  """Made-up problems and short episodes, for a first run without data."""
  c.data.path = c.data.heldout_path = ''
  c.data.kinds = ('arithmetic', 'modular', 'counting')
  c.data.levels = (3, 4)
  c.env.max_turns = 5
  c.env.observation_bytes = 512
  c.env.max_turn_tokens = 2048
  c.env.max_tokens = 4096
  c.sandbox.num_workers = 8
  c.sandbox.memory_mb = 256
  c.model.num_experts = 0
  c.model.experts_per_token = 0
  c.model.num_layers = 28  # of Qwen3-0.6B and 1.7B, as published
  c.model.num_heads = 16
  c.model.num_kv_heads = 8
  c.model.rope_theta = 1e6
  c.model.tied = True
  c.engine.prefill_rows = 4
  c.engine.prefill_buckets = (128, 512)
  c.value.num_batches = 8
  c.train.num_steps = 200
  c.train.batch_size = 64
  c.runtime.episode_timeout_s = 1200.0
  c.runtime.stall_timeout_s = 3600.0
  c.evaluation.num_problems = 128
  c.evaluation.samples = 1


def _small(c: ConfigDict) -> None:
  """Qwen3-0.6B: all weights of policy and critic."""
  _one_gpu(c)
  c.model.weights = 'models/Qwen3-0.6B'
  c.model.width = 1024
  c.model.mlp_width = 3072
  c.engine.num_slots = 32


def _middle(c: ConfigDict) -> None:
  """Qwen3-1.7B: adapters of policy and critic on one frozen backbone."""
  _one_gpu(c)
  c.model.weights = 'models/Qwen3-1.7B'
  c.model.width = 2048
  c.model.mlp_width = 6144
  c.model.lora_rank = 32
  c.model.lora_alpha = 64.0
  c.policy.learning_rate = 2e-5  # adapters want more than whole weights; not tuned
  c.critic.learning_rate = 1e-4
  c.engine.num_slots = 32


def _large(c: ConfigDict) -> None:
  """Qwen3-30B-A3B-Thinking-2507 at the paper's numbers, on 64 devices in 8 hosts."""
  c.model.weights = 'models/Qwen3-30B-A3B-Thinking-2507'
  c.chat.thinking = 'open'
  c.model.expert_backend = 'blocked'
  c.mesh.fsdp = 8
  c.mesh.tensor = 4  # as many as key/value heads
  c.mesh.sequence = 2
  c.train.micro_rows = 8
  c.engine.tensor = 4
  c.engine.expert = 2
  c.engine.num_slots = 4  # of 128k tokens; real rollouts belong on engines of their own
  # An episode's time counts while it waits for a slot, as 250 others do.
  c.runtime.episode_timeout_s = 2 * 86400.0
  c.runtime.stall_timeout_s = 3 * 86400.0
  c.engine.prefill_rows = 2
  c.engine.prefill_buckets = (256,)

"""What the compiler plans to hold in memory: the head at a large vocabulary, and a whole update with and without remat.

  python experiments/bench/memory.py [--output=docs/memory.md]

Only compiles: no array is made, and the weights of no model are needed. About ten minutes on two CPU cores.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / 'experiments'), str(ROOT / 'configs')]
import commands  # noqa: E402

VOCABULARY, WIDTH = 151_936, 1024  # of Qwen3-0.6B
TOKENS = (1024, 8192, 65_536)  # of one call of the head
CHUNK, HEAD_ROWS = 1024, 8
NAIVE = 'naive'
HEADS = ('token_logprobs', 'action_logprobs', NAIVE)

ROWS, LENGTH = 8, 2048  # of an update
MICRO_ROWS = 1
REMATS = ('none', 'dots_saveable', 'dots_with_no_batch_dims_saveable', 'nothing_saveable')
MODELS = {
  'SmolLM2-135M': {
    'vocab_size': 49_152,
    'width': 576,
    'num_layers': 30,
    'num_heads': 9,
    'num_kv_heads': 3,
    'head_dim': 64,
    'mlp_width': 1536,
    'rope_theta': 1e5,
    'norm_eps': 1e-5,
    'qk_norm': False,
  },
  'Qwen3-0.6B': {
    'vocab_size': VOCABULARY,
    'width': WIDTH,
    'num_layers': 28,
    'num_heads': 16,
    'num_kv_heads': 8,
    'head_dim': 128,
    'mlp_width': 3072,
    'rope_theta': 1e6,
    'norm_eps': 1e-6,
    'qk_norm': True,
  },
}


class Memory(NamedTuple):
  """Bytes of one compiled program."""

  arguments: int
  peak: int  # beside the arguments: temporaries and outputs, less the outputs that take a donated argument's place


def memory_of(lowered, **options) -> Memory:
  found = lowered.compile(compiler_options=options).memory_analysis()
  peak = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
  return Memory(found.argument_size_in_bytes, peak)


def head(name: str, tokens: int) -> Memory:
  """Log-probabilities, entropies, and the gradients of the former in hidden states and unembedding, all float32."""
  import jax
  import jax.numpy as jnp

  rows = HEAD_ROWS, tokens // HEAD_ROWS
  kinds = {(*rows, WIDTH): 'float32', (VOCABULARY, WIDTH): 'float32'}
  shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds.items()]
  shapes += [jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32)]

  def loss(hidden, unembedding, words, weights):
    logprobs, entropy = _head(name)(hidden, unembedding, words, weights)
    return (weights * logprobs).sum(), entropy

  gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  return memory_of(jax.jit(gradient).lower(*shapes))


def _head(name: str) -> Callable:
  """(hidden [B, T, D], unembedding [V, D], tokens [B, T], mask [B, T]) -> (log-probabilities, entropies)."""
  import jax
  import jax.numpy as jnp

  from sao_jax.models import heads

  def every_token(hidden, unembedding, tokens, mask):
    del mask
    return heads.token_logprobs(
      hidden.reshape(-1, WIDTH),
      unembedding,
      tokens.reshape(-1),
      temperature=1.0,
      chunk=CHUNK,
      entropy=True,
    )

  def actions(*args):
    return heads.action_logprobs(*args, temperature=1.0, chunk=CHUNK, parts=1)

  def naive(hidden, unembedding, tokens, mask):
    del mask
    logprobs = jax.nn.log_softmax(hidden @ unembedding.T)
    chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    return chosen, -(jnp.exp(logprobs) * logprobs).sum(axis=-1)

  if name == 'token_logprobs':
    flat = lambda out: tuple(x.reshape(HEAD_ROWS, -1) for x in out)
    return lambda *args: flat(every_token(*args))
  return actions if name == 'action_logprobs' else naive


def update(model: str, remat: str) -> Memory:
  """`learner.update` of the default method as a run compiles it: two critic updates, advantages, one policy update."""
  import beyondaime
  import jax

  from sao_jax import build
  from sao_jax.types import Batch

  config = beyondaime.get_config()
  config.model.update({**MODELS[model], 'remat': remat})
  config.env.max_tokens = LENGTH
  config.train.micro_rows = MICRO_ROWS
  config.train.logprob_chunk = CHUNK
  config.supervised.num_steps = 0
  parts = build.parts(config)
  whole = {'tokens': 'int32', 'segment_ids': 'int32', 'positions': 'int32'}
  batch = Batch(
    **{
      name: jax.ShapeDtypeStruct((ROWS, LENGTH), whole.get(name, 'float32'))
      for name in Batch.__dataclass_fields__
    }
  )
  # Both only cost minutes: LLVM comes after the plan, and folding (zero gradients of what is frozen) moves it by a millionth.
  return memory_of(
    parts.learner.update.lower(parts.state, batch),
    xla_disable_hlo_passes='constant_folding',
    xla_backend_optimization_level=0,
  )


def make_head_table(found: dict[tuple[str, int], Memory]) -> str:
  lines = [
    '| tokens | token_logprobs, MB | action_logprobs, MB | naive, MB | naive / token_logprobs | naive / action_logprobs |',
    '|' + '--:|' * 6,
  ]
  for tokens in TOKENS:
    chunked, actions, naive = (found[name, tokens].peak for name in HEADS)
    numbers = [f'{x / 1e6:,.0f}' for x in (chunked, actions, naive)]
    numbers += [f'{naive / x:.1f}' for x in (chunked, actions)]
    lines.append('| ' + ' | '.join([f'{tokens:,}', *numbers]) + ' |')
  return '\n'.join(lines)


def make_update_table(found: dict[tuple[str, str], Memory]) -> str:
  lines = [
    '| model | remat | state and batch, GB | on top, GB | of the lowest |',
    '|---|---|--:|--:|--:|',
  ]
  for model in MODELS:
    costs = {remat: found[model, remat] for remat in REMATS}
    least = min(cost.peak for cost in costs.values())
    for remat, (arguments, peak) in costs.items():
      numbers = f'{arguments / 1e9:.2f} | {peak / 1e9:.2f} | {peak / least:.1f}'
      lines.append(f'| {model} | `{remat}` | {numbers} |')
  return '\n'.join(lines)


def make_report(heads: dict, updates: dict) -> str:
  import jax
  import jaxlib

  device = jax.devices()[0].platform.upper()
  least, some, most = TOKENS
  growth = heads['token_logprobs', most].peak - heads['token_logprobs', some].peak
  return f"""# What the compiler plans to hold in memory

    python experiments/bench/memory.py --output=docs/memory.md

JAX {jax.__version__}, jaxlib {jaxlib.__version__}, XLA for {device}. The programs are compiled and not run: these are the plans of the {device} compiler,
and that of another device fuses and schedules otherwise. What is counted is what comes on top of the arguments: temporaries and outputs,
less the outputs that take the place of donated arguments. Everything is float32; MB and GB are powers of ten.

## The head

V = {VOCABULARY:,}, D = {WIDTH} (Qwen3-0.6B), chunks of {CHUNK} tokens in {HEAD_ROWS} rows; log-probabilities and entropies, and the gradients in hidden
states and unembedding. Those two gradients are outputs, and counted: {VOCABULARY * WIDTH * 4 / 1e6:,.0f} MB for the unembedding, {WIDTH * 4 / 1e3:.1f} kB a token for the states.
*Naive* is `jax.nn.log_softmax` of all logits at once.

{make_head_table(heads)}

From {some:,} to {most:,} tokens `token_logprobs` grows by {growth / 1e6:,.0f} MB; the gradient in the hidden states grows by {(most - some) * WIDTH * 4 / 1e6:,.0f} MB, and
the logits alone of {most:,} tokens are {most * VOCABULARY * 4 / 1e9:.1f} GB. {least:,} tokens are one chunk: there is nothing to save, and the loop is planned otherwise.
`action_logprobs` also holds the gathered hidden states. Its plan is that of a full mask; its time is not: the loop ends after the row with the most
actions, so that with a tenth of actions in every row it computes a tenth of the blocks.

## A whole update

`learner.update` of configs/beyondaime.py at {ROWS} rows of {LENGTH} tokens, {MICRO_ROWS} in a micro-batch: two critic updates, advantages, one policy update, with attention `xla`,
which holds the scores of a layer. LLVM's optimisation and constant folding are off, which only cost minutes: with them the plans of two of the
lines below differed by less than a millionth. The state is the weights of policy and critic, and AdamW's moments of
what is not frozen.

{make_update_table(updates)}

`remat` decides what a layer keeps for its backward pass: with `nothing_saveable` its input alone, with
`dots_with_no_batch_dims_saveable` also the products with weights, with `dots_saveable` also the attention scores.
That is for one micro-batch, and grows with `train.micro_rows`. What `nothing_saveable` leaves is about as large as the state: an update makes gradients,
and new weights and moments beside the old ones, which come back if something is not finite.
"""


def main(argv: Sequence[str]) -> None:
  with commands.input_errors():
    values = commands.parse(argv, _define)
  heads, updates = {}, {}
  for tokens in TOKENS:
    for name in HEADS:
      heads[name, tokens] = head(name, tokens)
      _tell(name, tokens, heads[name, tokens])
  for model in MODELS:
    for remat in REMATS:
      updates[model, remat] = update(model, remat)
      _tell(model, remat, updates[model, remat])
  report = make_report(heads, updates)
  if values.output:
    Path(values.output).write_text(report, encoding='utf-8')
  else:
    print(report)


def _tell(*words) -> None:
  print(*words, file=sys.stderr, flush=True)


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('output', '', 'File that is written; empty: prints it.', flag_values=values)


if __name__ == '__main__':
  commands.run(main)

"""The policy of a checkpoint as a Hugging Face folder, for transformers and for what reads its folders.

  python experiments/export.py --workdir=runs/NAME --to=FOLDER [--step=N] [--dtype=float32|bfloat16]

Writes config.json, the weights with adapters merged, and the files of the tokenizer where the run has one; FOLDER is whole or not there.
One device holds the whole policy in float32, wherever it was trained: JAX_PLATFORMS=cpu takes the memory of the host. Adapters are best
exported in float32: in bfloat16 their kernels lose what is below half a unit of the last place.
"""

from collections.abc import Sequence
from pathlib import Path

import commands
from absl import flags

SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
)


def main(argv: Sequence[str]) -> None:
  with commands.input_errors():
    values = commands.parse(argv, _define)
    if not values.workdir:
      raise ValueError('--workdir is missing: for example --workdir=runs/beyondaime-sao')
    if not values.to:
      raise ValueError('--to is missing: for example --to=models/mine')
    step = export(Path(values.workdir), values.step, Path(values.to), values.dtype)
  print(f'the policy of update {step} of {values.workdir} is in {values.to}')


def export(workdir: Path, step: int | None, folder: Path, dtype: str) -> int:
  """Writes the folder. Returns the update, which is the last one for a step of None.

  Raises:
    ValueError: no such run or checkpoint; an architecture that no model type of transformers has; a folder that is in use.
  """
  from sao_jax import build
  from sao_jax import workdir as run_workdir
  from sao_jax.build.model import shape_of
  from sao_jax.models import huggingface, lora, weights

  config = run_workdir.on_one_device(run_workdir.saved_config(workdir))
  config.data.path = config.data.heldout_path = ''  # no problem is asked here
  parts = build.parts(config)
  shape = shape_of(config, parts.model.chat.vocab_size)
  carried = {'eos_token_id': parts.model.chat.stop_token}
  if config.model.weights:
    theirs = weights.read_config(config.model.weights)
    carried = {name: theirs[name] for name in huggingface.CARRIED if name in theirs}
    carried['eos_token_id'] = _ends(theirs.get('eos_token_id'), parts.model.chat.stop_token)
  tokenizer = ()
  if config.chat.format != 'bytes':
    there = Path(config.chat.tokenizer or config.model.weights)
    tokenizer = [there / name for name in TOKENIZER_FILES if (there / name).exists()]
  # Not what engines take: that is rounded to the compute dtype.
  state, step = run_workdir.saved_state(parts, workdir, step)
  params, model = lora.join(state.base, state.policy), config.model
  if model.lora_rank:
    params = lora.merge(params, scale=model.lora_alpha / model.lora_rank)
  weights.save(
    folder,
    params,
    shape,
    dtype=dtype,
    max_shard_bytes=SHARD_BYTES,
    carried=carried,
    extra_files=tokenizer,
  )
  return step


def _ends(theirs: int | list[int] | None, ours: int) -> int | list[int]:
  """What ends a turn in the folder: what the policy was trained to stop with, too."""
  known = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
  ends = known if ours in known else [ours, *known]
  return ends[0] if len(ends) == 1 else ends


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('workdir', '', 'Folder of the run.', flag_values=values)
  flags.DEFINE_string('to', '', 'Folder to make.', flag_values=values)
  flags.DEFINE_integer(
    'step', None, 'Update of the checkpoint; the last one if absent.', flag_values=values
  )
  flags.DEFINE_enum(
    'dtype', 'float32', ('float32', 'bfloat16'), 'Of the weights.', flag_values=values
  )


if __name__ == '__main__':
  commands.run(main, resumable=False)

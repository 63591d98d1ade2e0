"""Exported checkpoints of runs: transformers computes with them what we compute, and what cannot be exported leaves nothing."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from sao_jax import build, checkpoint, pretraining
from sao_jax import workdir as run_workdir
from sao_jax.build.model import shape_of
from sao_jax.models import transformer, weights
from tests import test_chats
from tests.test_build import config
from tests.test_lora import SMALL

EXPERIMENTS = Path(__file__).parents[1] / 'experiments'
FEW = {**SMALL, 'supervised__num_steps': 0, 'evaluation__num_problems': 2}
LORA = {'model__lora_rank': 2, 'model__lora_alpha': 5.0, 'chat__format': 'smollm2'}
CARRIED = {'max_position_embeddings': 256, 'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 3}


def drawn(parts, seed):
  """Parameters that are large enough to tell a mistake."""
  rng = np.random.default_rng(seed)

  def leaf(keys, like):
    middle = 1 if keys[-1].key == 'scale' else 0
    return jnp.asarray(middle + 0.25 * rng.normal(size=like.shape), like.dtype)

  return jax.tree.map_with_path(leaf, jax.eval_shape(parts.model.model.init, jax.random.key(0)))


def run_of(workdir, c, seeds):
  """A run with a checkpoint for each update of `seeds`. Returns the parameters as they are trained."""
  workdir.mkdir()
  (workdir / 'config.json').write_text(c.to_json())
  parts, root = build.parts(c), workdir / 'checkpoints' / 'rl'
  params = {step: drawn(parts, seed) for step, seed in seeds.items()}
  for step, whole in params.items():
    state = pretraining.fresh_state(parts, whole)
    checkpoint.save(root, step, state, {}, (), run_id=run_workdir.run_id(c), keep=len(seeds))
  return params


@pytest.fixture
def export(monkeypatch):
  """The command in this process."""
  monkeypatch.syspath_prepend(str(EXPERIMENTS))
  command = importlib.import_module('export')
  monkeypatch.delitem(sys.modules, 'export')
  return lambda **flags: command.main(['export.py', *(f'--{k}={v}' for k, v in flags.items())])


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """(workdir, its parameters at the updates 1 and 3), computed in bfloat16 and trained in float32."""
  workdir = tmp_path_factory.mktemp('run') / 'w'
  return workdir, run_of(workdir, config(**FEW, model__dtype='bfloat16'), {1: 5, 3: 6})


def tensors(folder):
  return safetensors.numpy.load_file(folder / 'model.safetensors')


def assert_transformers_agrees(folder, c, params):
  torch = pytest.importorskip('torch', reason='parity needs the extra hf')
  transformers = pytest.importorskip('transformers', reason='parity needs the extra hf')
  theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, output_loading_info=True
  )
  assert not any(report.values()), report
  shape = shape_of(c, build.parts(c).model.chat.vocab_size)
  model = transformer.make(**{**shape, 'dtype': 'float32'}, mesh=None)
  tokens = np.random.default_rng(0).integers(0, model.vocab_size, (1, 12))
  positions = np.arange(12, dtype=np.int32)[None]
  hidden = jax.jit(model.apply)(params, tokens.astype(np.int32), positions, np.ones_like(positions))
  got = np.asarray(hidden[0]) @ np.asarray(model.unembedding(params)).T
  with torch.no_grad():
    want = theirs(torch.tensor(tokens)).logits[0].numpy()
  assert np.abs(want).max() > 1
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_the_last_update_as_it_is_trained(run, export, tmp_path, capsys):
  workdir, params = run
  export(workdir=workdir, to=tmp_path / 'new')
  assert 'update 3' in capsys.readouterr().out
  kernel = tensors(tmp_path / 'new')['model.layers.1.mlp.up_proj.weight']
  np.testing.assert_array_equal(kernel.T, params[3]['layers']['mlp']['up']['kernel'][1])
  stated = weights.read_config(tmp_path / 'new')
  stop = build.parts(run_workdir.saved_config(workdir)).model.chat.stop_token
  assert (stated['model_type'], stated['torch_dtype']) == ('qwen3', 'float32')
  assert (stated['eos_token_id'], stated['bos_token_id']) == (stop, None)
  assert_transformers_agrees(tmp_path / 'new', run_workdir.saved_config(workdir), params[3])


def test_an_earlier_update_rounded(run, export, tmp_path):
  workdir, params = run
  export(workdir=workdir, to=tmp_path / 'new', step=1, dtype='bfloat16')
  kernel = tensors(tmp_path / 'new')['model.layers.0.mlp.down_proj.weight']
  want = params[1]['layers']['mlp']['down']['kernel'][0].astype(jnp.bfloat16)
  assert kernel.dtype == jnp.bfloat16
  np.testing.assert_array_equal(kernel.T, want)
  assert weights.read_config(tmp_path / 'new')['torch_dtype'] == 'bfloat16'


def test_adapters_are_merged_and_the_tokenizer_comes_along(export, tmp_path):
  tokenizer = test_chats.write(tmp_path / 'tokenizer', test_chats.spec(test_chats.BYTES))
  (tokenizer / 'tokenizer_config.json').write_text('{"model_max_length": 64}')
  (tokenizer / 'other.json').write_text('{}')
  llama = {**FEW, 'model__qk_norm': False, 'model__tied': False, 'chat__format': 'smollm2'}
  plain = config(**llama, chat__tokenizer=str(tokenizer))
  parts = build.parts(plain)
  base, shape = tmp_path / 'base', shape_of(plain, parts.model.chat.vocab_size)
  given = drawn(parts, 1)
  numbers = {'dtype': 'float32', 'max_shard_bytes': 10**9, 'carried': CARRIED}
  weights.save(base, given, shape, **numbers)

  c = config(**{**llama, **LORA}, chat__tokenizer=str(tokenizer), model__weights=str(base))
  params = run_of(tmp_path / 'w', c, {2: 7})[2]
  export(workdir=tmp_path / 'w', to=tmp_path / 'new')
  ends = [
    parts.model.chat.stop_token,
    CARRIED['eos_token_id'],
  ]  # what it was trained to stop with, too
  assert weights.read_config(tmp_path / 'new') == {
    **weights.read_config(base),
    'eos_token_id': ends,
  }
  files = {path.name for path in (tmp_path / 'new').iterdir()}
  copied = {'tokenizer.json', 'tokenizer_config.json'}
  assert files == {'config.json', 'model.safetensors', *copied}
  for name in copied:
    assert (tmp_path / 'new' / name).read_bytes() == (tokenizer / name).read_bytes()
  name = 'model.layers.0.self_attn.v_proj.weight'
  assert not np.array_equal(tensors(tmp_path / 'new')[name], tensors(base)[name])
  assert_transformers_agrees(tmp_path / 'new', c, params)


def test_what_cannot_be_exported_is_named_and_leaves_nothing(run, export, tmp_path):
  workdir, _ = run
  refusals = importlib.import_module('commands').BadInput
  full, windowed = tmp_path / 'full', tmp_path / 'windowed'
  full.mkdir()
  (full / 'mine').write_text('x')
  c = config(**FEW, model__window=4, model__sinks=1)
  run_of(windowed, c, {1: 0})
  started = tmp_path / 'started'
  shutil.copytree(windowed, started, ignore=shutil.ignore_patterns('checkpoints'))
  before = sorted(path for path in tmp_path.rglob('*'))
  for flags, message in (
    ({'to': tmp_path / 'new'}, r'--workdir is missing'),
    ({'workdir': workdir}, r'--to is missing'),
    ({'workdir': tmp_path / 'none', 'to': tmp_path / 'new'}, r'none holds no run'),
    ({'workdir': workdir, 'to': full}, r'full is in use: name a new folder'),
    ({'workdir': workdir, 'to': tmp_path / 'new', 'step': 2}, r'updates \[1, 3\]: step 2 is not'),
    ({'workdir': started, 'to': tmp_path / 'new'}, r'has checkpoints of the updates \[\]'),
    ({'workdir': workdir, 'to': tmp_path / 'new', 'dtype': 'float16'}, 'dtype'),
    ({'workdir': windowed, 'to': tmp_path / 'new'}, r'window 4: no model type'),
  ):
    with pytest.raises(refusals, match=message) as error:
      export(**flags)
    assert '\n' not in str(error.value)
    assert sorted(path for path in tmp_path.rglob('*')) == before


def test_the_command_ends_with_one_line(tmp_path):
  command = [sys.executable, EXPERIMENTS / 'export.py', f'--workdir={tmp_path}', '--to=x']
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
  assert done.returncode == 2
  assert done.stderr == f'error: {tmp_path} holds no run: there is no config.json in it\n'
  assert not any(tmp_path.iterdir())

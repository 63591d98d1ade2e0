"""The memory of a run before it starts: exact where arrays are held, near the compiler where they come and go."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from sao_jax import build
from sao_jax.build import plan
from sao_jax.types import Batch
from tests.test_build import config

ROOT = Path(__file__).parents[1]
GIB = 2**30
COMMAND = ROOT / 'experiments' / 'plan.py'

# Of one layer of the default: q, k, v, o, their norms; gate, up, down; two norms.
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16
LAYER = ATTENTION + 3 * 64 * 192 + 2 * 64
VOCABULARY = 264
PARAMETERS = VOCABULARY * 64 + 2 * LAYER + 64
HEAD = 64 + 1
# Keys and values of 2 layers, 128 slots, 2 heads, 144 positions, 16 numbers; two engines.
CACHES = 2 * 2 * 2 * 128 * 2 * 144 * 16 * 4


def recipe(name: str, variant: str):
  return runpy.run_path(str(ROOT / 'configs' / f'{name}.py'))['get_config'](variant)


def test_what_is_held_by_hand():
  held = plan.of_config(config())[0].held
  assert held['policy parameters'] == 4 * PARAMETERS
  assert (
    held['policy optimiser'] == 2 * 4 * PARAMETERS + 8
  )  # two moments, and two counters of steps
  assert held['critic parameters'] == 4 * (PARAMETERS + HEAD)
  assert held['critic optimiser'] == 2 * 4 * (PARAMETERS - 2 * ATTENTION + HEAD) + 8
  assert held['engine weights'] == 3 * 4 * PARAMETERS  # in use, arriving, evaluated
  assert held['KV caches'] == CACHES
  assert held['batch'] == plan.ARRAYS * 4 * 64 * 144


def test_adapters_are_small_and_share_a_backbone():
  changes = {'model__lora_rank': 2, 'supervised__num_steps': 0, 'model__dtype': 'bfloat16'}
  held = plan.of_config(config(**changes))[0].held
  attention = 2 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))
  mlp = 2 * 3 * (64 + 192)
  assert held['frozen backbone'] == 4 * PARAMETERS
  assert held['policy parameters'] == 2 * 4 * (attention + mlp)
  assert held['policy optimiser'] == 2 * held['policy parameters'] + 8
  # Engines hold kernels and adapters in bfloat16; norms and table in float32.
  kernels = 2 * (ATTENTION - 32 + 3 * 64 * 192)
  rounded = kernels + 2 * (attention + mlp)
  assert held['engine weights'] == 3 * (2 * rounded + 4 * (PARAMETERS - kernels))


def test_with_remat_a_layer_saves_its_input_alone():
  def saved(layers):
    c = config(model__remat='nothing_saveable', model__num_layers=layers)
    return plan.activations(c, VOCABULARY)[0]

  assert saved(5) - saved(2) == 3 * 16 * 144 * 64 * 4
  assert plan.activations(config(), VOCABULARY)[0] > 10 * saved(2)


def test_an_update_is_near_what_the_compiler_plans():
  changes = {'model__vocab_size': 1000, 'train__batch_size': 8, 'train__micro_rows': 4}
  c = config('running_mean', **changes)  # without a critic: compiles sooner
  parts = build.parts(c)
  shape, integer = (plan.batch_rows(c), c.env.max_tokens), ('tokens', 'segment_ids', 'positions')
  dtypes = {
    name: jnp.int32 if name in integer else jnp.float32 for name in Batch.__dataclass_fields__
  }
  batch = Batch(**{name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()})
  lowered = parts.learner.update.lower(parts.state, batch)
  compiled = lowered.compile({'xla_backend_optimization_level': 0})  # the same memory, sooner
  planned = sum(plan.of_learner(parts).update.values())
  assert planned == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.25)


def test_the_largest_moment_counts():
  many = plan.Plan({'a': 5}, {'b': 3, 'c': 1}, {'d': 2})
  assert many.total == 9 and many.peak == {'a': 5, 'b': 3, 'c': 1}
  assert plan.together(many, plan.Plan({'e': 1}, {}, {'d': 2, 'f': 9})).total == 17
  plan.check([many], 9)


def test_a_score_needs_no_optimiser_and_no_critic():
  held = plan.of_scoring(build.parts(config())).held
  assert held['policy parameters'] == held['engine weights'] == 4 * PARAMETERS
  assert held['KV caches'] == CACHES and held['frozen backbone'] == 0
  assert not {name for name in held if 'critic' in name or 'optimiser' in name}


def test_refusal_names_what_is_largest_and_what_helps():
  plans = plan.of_config(config(engine__num_slots=4096))
  with pytest.raises(
    ValueError,
    match=r'1\.10 GiB of a device, 0\.85 GiB more than its 0\.25 GiB.*KV caches, 0\.56.*engine\.num_slots',
  ):
    plan.check(plans, GIB // 4)
  assert set(plans[0].held) | set(plans[0].update) | set(plans[0].publish) <= set(plan.REMEDIES)


@pytest.mark.parametrize(
  ('name', 'variant', 'gib'),
  [('qwen3', '0.6b', 80), ('qwen3', '1.7b', 80), ('smollm2', 'full', 10), ('smollm2', 'lora', 5)],
)
def test_a_recipe_fits_its_device_before_anything_is_downloaded(name, variant, gib):
  c = recipe(name, variant)
  assert c.model.weights
  plan.check(plan.of_config(c), gib * GIB)


def test_a_vocabulary_of_a_tokenizer_that_is_not_there_is_refused(tmp_path):
  c = recipe('qwen3', '0.6b').unlock()
  c.model.vocab_size, c.chat.tokenizer = 0, str(tmp_path)
  with pytest.raises(ValueError, match=r'model\.vocab_size=0 .*give model\.vocab_size'):
    plan.without_files(c)


def test_devices_of_a_cpu_share_the_memory_of_the_machine():
  line = next(x for x in Path('/proc/meminfo').read_text().splitlines() if x.startswith('MemTotal'))
  everything = len(jax.local_devices()) * plan.device_memory()
  assert everything == pytest.approx(1024 * int(line.split()[1]), rel=0.01)


ON_A_MESH = """
import contextlib, io, json, runpy, sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root / 'experiments'))
sys.argv = ['plan.py', f'--config={root}/configs/beyondaime.py', '--devices=64x0.05GB']
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
  try:
    runpy.run_path(str(root / 'experiments' / 'plan.py'), run_name='__main__')
  except SystemExit as end:
    found = {'command': {'code': end.code, 'out': out.getvalue(), 'err': err.getvalue()}}
import jax
from sao_jax import build
from sao_jax.build import plan
configs = str(root / 'configs')

def note(name, c):
  made = build.parts(plan.without_files(c))
  learner, engine = plan.of_learner(made), plan.of_engine(made)
  plans = plan.of_parts(made)
  found[name] = {**learner.held, **engine.held, 'plans': len(plans), 'total': max(x.total for x in plans)}

def small(**changes):
  c = runpy.run_path(configs + '/beyondaime.py')['get_config']().unlock()
  for field, value in changes.items():
    section, _, name = field.partition('__')
    c[section][name] = value
  return c

note('fsdp', small(mesh__fsdp=4))
note('tensor', small(mesh__tensor=2, mesh__data=2, engine__tensor=2, engine__apart=True))
note('host', small(mesh__fsdp=4, train__optimizer_memory='pinned_host'))
note('30b', runpy.run_path(configs + '/qwen3.py')['get_config']('30b'))
print(json.dumps(found))
"""


@pytest.fixture(scope='module')
def on_a_mesh():
  """The command's refusal, and plans of meshes, from one process with 64 virtual devices."""
  clean = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  command = [sys.executable, '-c', ON_A_MESH, str(ROOT)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=clean)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def test_a_mesh_divides_exactly(on_a_mesh):
  # fsdp cuts every kernel and the embedding, and no norm: 2 norms of 64 and 2 of 16 a layer, and the last one.
  norms = 2 * (2 * 64 + 2 * 16) + 64
  cut = norms + (PARAMETERS - norms) // 4
  assert on_a_mesh['fsdp']['policy parameters'] == 4 * cut
  assert on_a_mesh['fsdp']['policy optimiser'] == 8 * cut + 8
  assert on_a_mesh['fsdp']['KV caches'] == CACHES
  assert on_a_mesh['host']['policy optimiser'] == 8  # the counters stay
  assert on_a_mesh['host']['policy parameters'] == 4 * cut
  half = norms + (PARAMETERS - norms) // 2
  assert on_a_mesh['tensor']['policy parameters'] == 4 * half
  assert on_a_mesh['tensor']['engine weights'] == 3 * 4 * half
  assert 2 * on_a_mesh['tensor']['KV caches'] == CACHES
  assert (on_a_mesh['fsdp']['plans'], on_a_mesh['tensor']['plans']) == (1, 2)  # apart


def test_the_recipe_of_the_paper_fits_64_devices(on_a_mesh):
  assert on_a_mesh['30b']['total'] < 0.9 * 140 * GIB
  # 30.5e9 parameters over fsdp 8 and tensor 4, but for the router and the norms.
  assert on_a_mesh['30b']['policy parameters'] == pytest.approx(4 * 30.5e9 / 32, rel=0.02)


def test_the_command_refuses_with_exit_code_2(on_a_mesh):
  done = on_a_mesh['command']
  assert done['code'] == 2, done
  assert 'sum' in done['out'] and 'fits' not in done['out']
  last = done['err'].splitlines()[-1]
  assert last.startswith('error: this needs 0.12 GiB of a device, 0.07 GiB more than its 0.05 GiB')
  assert 'the largest part is activations, 0.07 GiB' in last and 'model.remat' in last


@pytest.mark.parametrize('text', ['', '8', '0x80GiB', '8x80', '8x80TB', 'x80GiB', '8 x 80GiB'])
def test_devices_are_a_number_and_a_memory(text):
  sys.path.insert(0, str(COMMAND.parent))
  try:
    parse = runpy.run_path(str(COMMAND))['parse_devices']
  finally:
    sys.path.remove(str(COMMAND.parent))
  assert parse('8x80GiB') == (8, 80 * GIB) and parse('1x1.5GB') == (1, 1_500_000_000)
  with pytest.raises(ValueError, match=r'--devices=.*8x80GiB'):
    parse(text)

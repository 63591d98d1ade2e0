"""Hugging Face folders, written by hand: layout by loops, round trips by bits, what is refused, parts of a mesh."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from sao_jax.models import huggingface, weights
from tests.devices import on_eight

BASE = {
  'vocab_size': 11,
  'width': 8,
  'num_layers': 2,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 6,
  'mlp_width': 10,
  'rope_theta': 500.0,
  'rope_scaling': None,
  'norm_eps': 1e-5,
  'qk_norm': False,
  'qkv_bias': False,
  'tied': False,
  'num_experts': 0,
  'experts_per_token': 0,
  'normalize_topk': False,
}
LLAMA3 = {
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position': 64,
}
MOE = {'qk_norm': True, 'num_experts': 4, 'experts_per_token': 2, 'normalize_topk': True}
KINDS = {
  'llama': BASE | {'rope_scaling': LLAMA3},
  'qwen2': BASE | {'qkv_bias': True, 'tied': True},
  'qwen3': BASE | {'qk_norm': True},
  'qwen3_moe': BASE | MOE,
}
CARRIED = {'eos_token_id': 3, 'max_position_embeddings': 99}
OPTIONS = {'dtype': 'float32', 'max_shard_bytes': 10**9, 'carried': CARRIED}


def theirs(kind, dtype=np.float32):
  """The tensors of a checkpoint, shapes written out."""
  a, rng = KINDS[kind], np.random.default_rng(0)
  shapes = {'model.embed_tokens.weight': (11, 8), 'model.norm.weight': (8,)}
  if not a['tied']:
    shapes['lm_head.weight'] = (11, 8)
  for layer in range(2):
    block = f'model.layers.{layer}'
    shapes |= {f'{block}.{x}layernorm.weight': (8,) for x in ('input_', 'post_attention_')}
    shapes |= {f'{block}.self_attn.{x}_proj.weight': (24 if x == 'q' else 12, 8) for x in 'qkv'}
    shapes[f'{block}.self_attn.o_proj.weight'] = (8, 24)
    if a['qkv_bias']:
      shapes |= {f'{block}.self_attn.{x}_proj.bias': (24 if x == 'q' else 12,) for x in 'qkv'}
    if a['qk_norm']:
      shapes |= {f'{block}.self_attn.{x}_norm.weight': (6,) for x in 'qk'}
    mlps = [f'{block}.mlp']
    if a['num_experts']:
      shapes[f'{block}.mlp.gate.weight'] = (4, 8)
      mlps = [f'{block}.mlp.experts.{expert}' for expert in range(4)]
    for mlp in mlps:
      shapes |= {f'{mlp}.{x}_proj.weight': (10, 8) for x in ('gate', 'up')}
      shapes[f'{mlp}.down_proj.weight'] = (8, 10)
  tensors = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
  tensors['model.norm.weight'][:2] = 1e-39, -0.0  # a subnormal and a signed zero must survive
  return tensors


def folder_of(path, tensors):
  path.mkdir()
  safetensors.numpy.save_file(tensors, path / 'model.safetensors')
  return path


def like(kind, dtype=jnp.float32, **changes):
  tree = {}
  for path, (_, shape) in huggingface.names(KINDS[kind] | changes).items():
    *above, leaf = path.split('/')
    node = tree
    for key in above:
      node = node.setdefault(key, {})
    node[leaf] = jax.ShapeDtypeStruct(shape, dtype)
  return tree


def tensors_in(folder):
  files = sorted(folder.glob('*.safetensors'))
  read = [safetensors.numpy.load_file(file) for file in files]
  assert sum(map(len, read)) == len(set().union(*read))  # none twice
  return {name: tensor for tensors in read for name, tensor in tensors.items()}


def assert_same_bits(got, want):
  assert set(got) == set(want)
  for name in want:
    assert got[name].dtype == want[name].dtype, name
    assert got[name].shape == want[name].shape, name
    assert got[name].tobytes() == want[name].tobytes(), name


def flat(params):
  return {
    jax.tree_util.keystr(keys): np.asarray(x) for keys, x in jax.tree.leaves_with_path(params)
  }


def test_layout_of_attention(tmp_path):
  tensors = theirs('qwen2')
  params = weights.load(folder_of(tmp_path / 'm', tensors), like('qwen2'))
  attention = params['layers']['attention']
  for name, heads in (('q', 4), ('k', 2), ('v', 2)):
    for layer in range(2):
      kernel = tensors[f'model.layers.{layer}.self_attn.{name}_proj.weight']
      bias = tensors[f'model.layers.{layer}.self_attn.{name}_proj.bias']
      for head in range(heads):
        for i in range(6):
          np.testing.assert_array_equal(
            attention[name]['kernel'][layer, :, head, i], kernel[head * 6 + i]
          )
          assert attention[name]['bias'][layer, head, i] == bias[head * 6 + i]
  out = tensors['model.layers.1.self_attn.o_proj.weight']
  np.testing.assert_array_equal(attention['o']['kernel'][1, 2, 3], out[:, 2 * 6 + 3])
  assert 'unembed' not in params


def test_layout_of_the_rest(tmp_path):
  tensors = theirs('qwen3_moe')
  params = weights.load(folder_of(tmp_path / 'm', tensors), like('qwen3_moe'))
  layers, block = params['layers'], 'model.layers.1.'
  expected = {
    'embed': (params['embed']['embedding'], tensors['model.embed_tokens.weight']),
    'head': (params['unembed']['kernel'], tensors['lm_head.weight']),
    'norm': (params['final_norm']['scale'], tensors['model.norm.weight']),
    'first': (layers['attention_norm']['scale'][1], tensors[block + 'input_layernorm.weight']),
    'second': (layers['mlp_norm']['scale'][1], tensors[block + 'post_attention_layernorm.weight']),
    'q_norm': (
      layers['attention']['q_norm']['scale'][1],
      tensors[block + 'self_attn.q_norm.weight'],
    ),
    'k_norm': (
      layers['attention']['k_norm']['scale'][1],
      tensors[block + 'self_attn.k_norm.weight'],
    ),
    'router': (layers['moe']['router']['kernel'][1], tensors[block + 'mlp.gate.weight'].T),
  }
  for name in ('gate', 'up', 'down'):
    expert = tensors[block + f'mlp.experts.3.{name}_proj.weight'].T
    expected[name] = layers['moe'][name]['kernel'][1, 3], expert
  for name, (got, want) in expected.items():
    np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_round_trip_keeps_every_bit(tmp_path, kind, dtype):
  """Files to float32 parameters to files; and from those once more."""
  tensors = theirs(kind, jnp.dtype(dtype))
  params = weights.load(folder_of(tmp_path / 'm', tensors), like(kind))
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  options = OPTIONS | {'dtype': dtype}
  weights.save(tmp_path / 'new', params, KINDS[kind], **options)
  assert_same_bits(tensors_in(tmp_path / 'new'), tensors)
  again = weights.load(tmp_path / 'new', like(kind))
  assert_same_bits(flat(again), flat(params))
  config = weights.read_config(tmp_path / 'new')
  assert huggingface.arguments(config) == KINDS[kind]
  assert (config['model_type'], config['torch_dtype']) == (kind, dtype)
  assert {key: config[key] for key in CARRIED} == CARRIED
  assert config['bos_token_id'] is None  # and not that of another model


def test_rounds_to_the_dtype_that_is_wanted(tmp_path):
  tensors = theirs('llama')
  params = weights.load(folder_of(tmp_path / 'm', tensors), like('llama', jnp.bfloat16))
  want = tensors['model.embed_tokens.weight'].astype(ml_dtypes.bfloat16)
  assert np.asarray(params['embed']['embedding']).tobytes() == want.tobytes()


def test_several_files_with_an_index(tmp_path):
  tensors = theirs('qwen3')
  params = weights.load(folder_of(tmp_path / 'm', tensors), like('qwen3'))
  extra = tmp_path / 'tokenizer.json'
  extra.write_text('{"a": 1}')
  options = OPTIONS | {'max_shard_bytes': 2000, 'extra_files': [extra]}
  weights.save(tmp_path / 'new', params, KINDS['qwen3'], **options)
  index = json.loads((tmp_path / 'new' / 'model.safetensors.index.json').read_text())
  files = sorted(tmp_path.glob('new/*.safetensors'))
  assert len(files) > 3 and {f.name for f in files} == set(index['weight_map'].values())
  assert index['metadata']['total_size'] == sum(x.nbytes for x in tensors.values())
  for file in files:
    held = safetensors.numpy.load_file(file)
    assert sum(x.nbytes for x in held.values()) <= 2000
    assert {name for name, where in index['weight_map'].items() if where == file.name} == set(held)
  assert_same_bits(tensors_in(tmp_path / 'new'), tensors)
  assert_same_bits(flat(weights.load(tmp_path / 'new', like('qwen3'))), flat(params))
  assert (tmp_path / 'new' / 'tokenizer.json').read_text() == '{"a": 1}'

  files[1].unlink()
  with pytest.raises(weights.WeightsError, match=f'lacks {files[1].name}'):
    weights.load(tmp_path / 'new', like('qwen3'))


def test_every_mismatch_is_listed_on_both_sides(tmp_path):
  tensors = theirs('llama')
  tensors['model.layers.1.self_attn.q_proj.bias'] = np.ones(24, np.float32)
  tensors['model.layers.2.mlp.up_proj.weight'] = np.ones((10, 8), np.float32)
  del tensors['model.norm.weight'], tensors['model.layers.0.mlp.down_proj.weight']
  tensors['lm_head.weight'] = tensors['lm_head.weight'].T.copy()
  tensors['model.embed_tokens.weight'] = np.ones((11, 8), np.int8)
  with pytest.raises(weights.WeightsError) as error:
    weights.load(folder_of(tmp_path / 'm', tensors), like('llama'))
  for part in (
    'not in the files: model.layers.0.mlp.down_proj.weight, model.norm.weight;',
    'not in the model: model.layers.1.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight;',
    'lm_head.weight has shape (8, 11), the model has (11, 8)',
    'model.embed_tokens.weight is I8',
  ):
    assert part in str(error.value)


def test_known_leftovers(tmp_path):
  """A tied checkpoint may repeat the embedding, and old ones hold rotary frequencies."""
  tensors = theirs('qwen2')
  tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(3, np.float32)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
  weights.load(folder_of(tmp_path / 'a', tensors), like('qwen2'))
  tensors['lm_head.weight'][10, 7] += 1
  with pytest.raises(weights.WeightsError, match=r'lm_head.weight differs .* tied=False'):
    weights.load(folder_of(tmp_path / 'b', tensors), like('qwen2'))
  del tensors['lm_head.weight']
  with pytest.raises(weights.WeightsError, match='not in the files: lm_head'):
    weights.load(folder_of(tmp_path / 'c', tensors), like('qwen2', tied=False))


def test_damaged_folders(tmp_path):
  folder = folder_of(tmp_path / 'm', theirs('llama'))
  whole = (folder / 'model.safetensors').read_bytes()
  for bad in (whole[:-100], whole[:5], b''):
    (folder / 'model.safetensors').write_bytes(bad)
    with pytest.raises(weights.WeightsError, match=r'model.safetensors is damaged'):
      weights.load(folder, like('llama'))
  (folder / 'model.safetensors').unlink()
  with pytest.raises(weights.WeightsError, match=r'lacks model.safetensors'):
    weights.load(folder, like('llama'))
  (folder / 'model.safetensors.index.json').write_text('{"weight_')
  with pytest.raises(weights.WeightsError, match=r'index.json cannot be read'):
    weights.load(folder, like('llama'))
  with pytest.raises(weights.WeightsError, match=r'config.json cannot be read'):
    weights.read_config(folder)


def test_an_entry_without_a_name_is_refused(tmp_path):
  folder = folder_of(tmp_path / 'm', theirs('llama'))
  tree = like('llama')
  tree['layers']['attention']['q']['lora_a'] = jax.ShapeDtypeStruct((2, 8, 1), jnp.float32)
  with pytest.raises(weights.WeightsError, match='layers/attention/q/lora_a has no name'):
    weights.load(folder, tree)
  params = weights.load(folder, like('llama'))
  params['value'] = {'kernel': np.ones(3)}
  del params['final_norm']
  with pytest.raises(
    weights.WeightsError, match=r'final_norm/scale is missing; value/kernel has no name'
  ):
    weights.save(tmp_path / 'new', params, KINDS['llama'], **OPTIONS)
  with pytest.raises(
    weights.WeightsError, match=r'embed/embedding has shape \(11, 8\), arguments say \(12, 8\)'
  ):
    weights.save(tmp_path / 'new', params, KINDS['llama'] | {'vocab_size': 12}, **OPTIONS)
  assert not (tmp_path / 'new').exists()


def test_saving_is_whole_or_not_at_all(tmp_path):
  def tensors():
    yield 'a', np.ones(3, np.float32)
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    weights.write(tmp_path / 'new', {}, tensors(), max_shard_bytes=1)
  assert list(tmp_path.iterdir()) == []
  (tmp_path / 'used').mkdir()
  (tmp_path / 'used' / 'notes').write_text('mine')
  with pytest.raises(weights.WeightsError, match='used is in use'):
    weights.write(tmp_path / 'used', {}, [], max_shard_bytes=1)
  assert [file.name for file in tmp_path.rglob('*')] == ['used', 'notes']


MESH = """
import json, pathlib, sys
import jax, numpy as np
from sao_jax import sharding
from sao_jax.models import weights
from tests import test_weights as t

root = pathlib.Path(sys.argv[1])
largest = {}
read = weights._read
def spy(tensors, name, leaf, index):
  out = read(tensors, name, leaf, index)
  largest.setdefault(name.path, []).append(out.size / np.prod(leaf.shape))
  return out
weights._read = spy
mesh = sharding.make_mesh({'fsdp': 2, 'tensor': 2, 'expert': 2})
report = {}
for kind in ('qwen3_moe', 'qwen2'):
  shapes = t.like(kind, vocab_size=12)
  plain = weights.load(root / kind, shapes)
  largest.clear()
  placed = sharding.with_shardings(shapes, sharding.tree_shardings(shapes, mesh))
  params = weights.load(root / kind, placed)
  same = jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), plain, params)
  right = jax.tree.map(lambda x, y: x.sharding == y.sharding, params, placed)
  weights.save(root / f'{kind}-out', params, t.KINDS[kind] | {'vocab_size': 12}, **t.OPTIONS)
  report[kind] = [all(jax.tree.leaves(same)), all(jax.tree.leaves(right)), dict(largest)]
  largest.clear()
print(json.dumps(report))
"""


def test_every_device_reads_its_own_part(tmp_path):
  """2 x 2 x 2 devices: the same numbers, no part of a sharded parameter larger than its shard, none read twice."""
  sources = {}
  for kind in ('qwen3_moe', 'qwen2'):
    tensors = theirs(kind)
    for name in {'model.embed_tokens.weight', 'lm_head.weight'} & set(tensors):
      tensors[name] = np.vstack([tensors[name], tensors[name][:1]])
    sources[kind] = tensors
    folder_of(tmp_path / kind, tensors)
  report = on_eight(MESH, str(tmp_path))
  for kind, (same, right, parts) in report.items():
    assert same and right
    assert parts['embed/embedding'] == [1 / 4] * 4
    assert parts['layers/attention/q/kernel'] == [1 / 4] * 4
    assert parts['layers/attention/o/kernel'] == [1 / 4] * 4
    assert parts['final_norm/scale'] == [1]
    assert_same_bits(tensors_in(tmp_path / f'{kind}-out'), sources[kind])
  assert report['qwen3_moe'][2]['layers/moe/down/kernel'] == [1 / 8] * 8
  assert report['qwen2'][2]['layers/attention/q/bias'] == [1 / 2] * 2

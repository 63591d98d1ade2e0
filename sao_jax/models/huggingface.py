"""Hugging Face's config.json and tensor names, in both directions: Llama (SmolLM2), Qwen2, Qwen3, Qwen3-MoE.

A field that would change the numbers, and that the decoder does not do, is refused by name: a model that is loaded
nearly right writes fluent rubbish.
"""

import math
from typing import Any, NamedTuple

import numpy as np

# Fields that the decoder does not read and that an export hands on.
CARRIED = ('max_position_embeddings', 'bos_token_id', 'eos_token_id', 'pad_token_id')

MODEL_TYPES = {
  'llama': 'LlamaForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'qwen3_moe': 'Qwen3MoeForCausalLM',
}
# What transformers takes where config.json says nothing.
_HEAD_DIM = {'qwen3': 128}
_ROPE_THETA = 10000.0

_ROPE_NAMES = {
  'factor': 'factor',
  'low_freq_factor': 'low_freq_factor',
  'high_freq_factor': 'high_freq_factor',
  'original_max_position': 'original_max_position_embeddings',
}


class Name(NamedTuple):
  """One parameter in both worlds. `axes` and `their_axes` speak of one layer (and expert) of it.

  A letter is an axis: v vocabulary, d width, h query heads, g key/value heads, k head_dim, f mlp_width, e experts. Letters
  that stand together in `their_axes` are one axis of theirs, row-major. A parameter whose name has {layer} (and {expert}) is
  stacked on leading axes of ours.
  """

  path: str
  theirs: str
  axes: str
  their_axes: str
  needs: str = ''  # the trait of an architecture that has it, see `names`

  @property
  def stacked(self) -> int:
    """How many leading axes of ours are separate tensors of theirs."""
    return ('{layer}' in self.theirs) + ('{expert}' in self.theirs)

  def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of each of their tensors, from the shape of our parameter. Raises ValueError on a wrong rank."""
    if len(shape) != self.stacked + len(self.axes):
      raise ValueError(
        f'{self.path} has shape {shape}, should have {self.stacked + len(self.axes)} axes'
      )
    sizes = dict(zip(self.axes, shape[self.stacked :], strict=True))
    return tuple(math.prod(sizes[axis] for axis in group) for group in self.their_axes.split())

  def convert(self, block: np.ndarray) -> np.ndarray:
    """One of their tensors, from one layer (and expert) of ours."""
    order = [self.axes.index(axis) for axis in self.their_axes.replace(' ', '')]
    stack = (1,) * self.stacked
    return block.transpose(order).reshape(self.their_shape((*stack, *block.shape)))

  def cut(self, tensor: Any, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
    """The part `index` of one layer (and expert) of ours, which has `shape`, from their tensor.

    Args:
      tensor: gives a np.ndarray for a tuple of slices. Where several of our axes share one of theirs, the first is cut by
        these slices and the others afterwards.
    """
    sizes = dict(zip(self.axes, shape, strict=True))
    cuts = dict(zip(self.axes, index, strict=True))
    groups = self.their_axes.split()
    ranges, split, rest = [], [], []
    for first, *others in groups:
      stride = math.prod(sizes[axis] for axis in others)
      start, stop = cuts[first].start, cuts[first].stop
      ranges.append(slice(start * stride, stop * stride))
      split += [stop - start, *(sizes[axis] for axis in others)]
      rest += [slice(None), *(cuts[axis] for axis in others)]
    block = tensor[tuple(ranges)].reshape(split)[tuple(rest)]
    letters = ''.join(groups)
    return block.transpose([letters.index(axis) for axis in self.axes])


_LAYER = 'model.layers.{layer}.'
_EXPERT = _LAYER + 'mlp.experts.{expert}.'
_ATTENTION = _LAYER + 'self_attn.'
NAMES = (
  Name('embed/embedding', 'model.embed_tokens.weight', 'vd', 'v d'),
  Name('layers/attention_norm/scale', _LAYER + 'input_layernorm.weight', 'd', 'd'),
  Name('layers/attention/q/kernel', _ATTENTION + 'q_proj.weight', 'dhk', 'hk d'),
  Name('layers/attention/k/kernel', _ATTENTION + 'k_proj.weight', 'dgk', 'gk d'),
  Name('layers/attention/v/kernel', _ATTENTION + 'v_proj.weight', 'dgk', 'gk d'),
  Name('layers/attention/q/bias', _ATTENTION + 'q_proj.bias', 'hk', 'hk', 'qkv_bias'),
  Name('layers/attention/k/bias', _ATTENTION + 'k_proj.bias', 'gk', 'gk', 'qkv_bias'),
  Name('layers/attention/v/bias', _ATTENTION + 'v_proj.bias', 'gk', 'gk', 'qkv_bias'),
  Name('layers/attention/q_norm/scale', _ATTENTION + 'q_norm.weight', 'k', 'k', 'qk_norm'),
  Name('layers/attention/k_norm/scale', _ATTENTION + 'k_norm.weight', 'k', 'k', 'qk_norm'),
  Name('layers/attention/o/kernel', _ATTENTION + 'o_proj.weight', 'hkd', 'd hk'),
  Name('layers/mlp_norm/scale', _LAYER + 'post_attention_layernorm.weight', 'd', 'd'),
  Name('layers/mlp/gate/kernel', _LAYER + 'mlp.gate_proj.weight', 'df', 'f d', 'dense'),
  Name('layers/mlp/up/kernel', _LAYER + 'mlp.up_proj.weight', 'df', 'f d', 'dense'),
  Name('layers/mlp/down/kernel', _LAYER + 'mlp.down_proj.weight', 'fd', 'd f', 'dense'),
  Name('layers/moe/router/kernel', _LAYER + 'mlp.gate.weight', 'de', 'e d', 'experts'),
  Name('layers/moe/gate/kernel', _EXPERT + 'gate_proj.weight', 'df', 'f d', 'experts'),
  Name('layers/moe/up/kernel', _EXPERT + 'up_proj.weight', 'df', 'f d', 'experts'),
  Name('layers/moe/down/kernel', _EXPERT + 'down_proj.weight', 'fd', 'd f', 'experts'),
  Name('final_norm/scale', 'model.norm.weight', 'd', 'd'),
  Name('unembed/kernel', 'lm_head.weight', 'vd', 'v d', 'untied'),
)


def names(arguments: dict[str, Any]) -> dict[str, tuple[Name, tuple[int, ...]]]:
  """Path -> (name, our shape) of every parameter of an architecture, in the order in which files hold them."""
  sizes = {
    'v': arguments['vocab_size'],
    'd': arguments['width'],
    'h': arguments['num_heads'],
    'g': arguments['num_kv_heads'],
    'k': arguments['head_dim'],
    'f': arguments['mlp_width'],
    'e': arguments['num_experts'],
  }
  traits = {'', 'experts' if arguments['num_experts'] else 'dense'}
  traits |= {trait for trait in ('qkv_bias', 'qk_norm') if arguments[trait]}
  traits |= set() if arguments['tied'] else {'untied'}
  stack = (arguments['num_layers'], arguments['num_experts'])
  return {
    name.path: (name, (*stack[: name.stacked], *(sizes[axis] for axis in name.axes)))
    for name in NAMES
    if name.needs in traits
  }


def arguments(config: dict[str, Any]) -> dict[str, Any]:
  """The architecture of a config.json, as arguments of `transformer.make`.

  Args:
    config: the parsed config.json.

  Returns:
    vocab_size, width, num_layers, num_heads, num_kv_heads, head_dim, mlp_width, rope_theta, rope_scaling, norm_eps, qk_norm,
    qkv_bias, tied, num_experts, experts_per_token and normalize_topk (0, 0 and False without experts).

  Raises:
    ValueError: on a missing field, and on every field whose value the decoder cannot honor.
  """
  kind = _one_of(config, 'model_type', None, MODEL_TYPES)
  _refuse_what_we_lack(config, kind)
  heads, width = _field(config, 'num_attention_heads'), _field(config, 'hidden_size')
  theta, scaling = _rope(config)
  sparse = kind == 'qwen3_moe'
  # transformers 5 calls the number of experts num_local_experts in what it writes.
  experts = config.get('num_local_experts') or _field(config, 'num_experts') if sparse else 0
  return {
    'vocab_size': _field(config, 'vocab_size'),
    'width': width,
    'num_layers': _field(config, 'num_hidden_layers'),
    'num_heads': heads,
    'num_kv_heads': config.get('num_key_value_heads') or heads,
    'head_dim': config.get('head_dim') or _HEAD_DIM.get(kind, width // heads),
    'mlp_width': _field(config, 'moe_intermediate_size' if sparse else 'intermediate_size'),
    'rope_theta': theta,
    'rope_scaling': scaling,
    'norm_eps': float(_field(config, 'rms_norm_eps')),
    'qk_norm': kind in ('qwen3', 'qwen3_moe'),
    'qkv_bias': kind == 'qwen2',
    'tied': bool(config.get('tie_word_embeddings', False)),  # the default of all four
    'num_experts': experts,
    'experts_per_token': _field(config, 'num_experts_per_tok') if sparse else 0,
    'normalize_topk': bool(config.get('norm_topk_prob', False)) if sparse else False,
  }


def config(arguments: dict[str, Any], dtype: str, carried: dict[str, Any]) -> dict[str, Any]:
  """A config.json that transformers loads, the inverse of `arguments`.

  RoPE is told the older way (rope_theta and rope_scaling), which both old and new versions read.

  Args:
    arguments: of `transformer.make`; of those that are not the architecture, only window is looked at.
    dtype: of the weights beside it, 'float32' or 'bfloat16'.
    carried: values of CARRIED, those of the config.json that the weights came from. What is left out is null, never a default
      of the model type, except that max_position_embeddings is then left out.

  Raises:
    ValueError: if no known model type has this architecture, or `carried` has another field.
  """
  a = arguments
  unknown = set(carried) - set(CARRIED)
  if unknown:
    raise ValueError(f'carried has {sorted(unknown)}, can have {CARRIED}')
  if a.get('window'):
    raise ValueError(
      f'window {a["window"]}: no model type of ours has one, its users would not apply it'
    )
  if a['qkv_bias'] and (a['qk_norm'] or a['num_experts']):
    raise ValueError('qkv_bias together with qk_norm or experts: no model type of ours has both')
  if a['num_experts'] and not a['qk_norm']:
    raise ValueError('experts without qk_norm: no model type of ours has them')
  kind = 'qwen3' if a['qk_norm'] else 'qwen2' if a['qkv_bias'] else 'llama'
  experts = {}
  if a['num_experts']:
    kind = 'qwen3_moe'
    experts = {
      'moe_intermediate_size': a['mlp_width'],
      'num_experts': a['num_experts'],
      'num_experts_per_tok': a['experts_per_token'],
      'norm_topk_prob': a['normalize_topk'],
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }
  scaling = a['rope_scaling'] and {
    'rope_type': 'llama3',
    **{theirs: a['rope_scaling'][ours] for ours, theirs in _ROPE_NAMES.items()},
  }
  return {
    'architectures': [MODEL_TYPES[kind]],
    'model_type': kind,
    'torch_dtype': dtype,
    'vocab_size': a['vocab_size'],
    'hidden_size': a['width'],
    'intermediate_size': a['mlp_width'],
    'num_hidden_layers': a['num_layers'],
    'num_attention_heads': a['num_heads'],
    'num_key_value_heads': a['num_kv_heads'],
    'head_dim': a['head_dim'],
    'hidden_act': 'silu',
    'rms_norm_eps': a['norm_eps'],
    'rope_theta': a['rope_theta'],
    'rope_scaling': scaling,
    'tie_word_embeddings': a['tied'],
    **experts,
    **{field: None for field in CARRIED if field.endswith('token_id')},
    **carried,
  }


def _field(config, field):
  """A field that must be there."""
  if config.get(field) is None:
    raise ValueError(f'config.json has no {field}: take the one that came with the weights')
  return config[field]


def _one_of(config, field, default, allowed):
  """A field whose value must be known."""
  value = config.get(field, default)
  if value not in allowed:
    raise ValueError(f'config.json: {field} {value!r} is not supported, only {list(allowed)}')
  return value


def _refuse_what_we_lack(config, kind):
  """Raises on fields that change the numbers in a way that the decoder does not do."""
  _one_of(config, 'hidden_act', 'silu', ('silu',))
  _one_of(config, 'mlp_bias', False, (False, None))
  if kind != 'qwen2':  # which always has it, on q, k and v, whatever the field says
    _one_of(config, 'attention_bias', False, (False, None))
  _one_of(config, 'partial_rotary_factor', 1.0, (1.0, None))
  _one_of(config, 'mlp_only_layers', None, ([], None))
  _one_of(config, 'decoder_sparse_step', 1, (1,))
  if config.get('quantization_config') is not None:
    raise ValueError(
      'config.json: quantization_config is not supported: dequantize the weights first'
    )
  layers = config.get('num_hidden_layers', 0)
  kinds = config.get('layer_types')
  if kinds is None and config.get('use_sliding_window') and config.get('sliding_window'):
    first = 0 if kind == 'qwen3_moe' else config.get('max_window_layers', 28)
    kinds = ['sliding_attention'] * (layers - first)
  if set(kinds or ()) - {'full_attention'}:
    raise ValueError(
      f'config.json: layer_types / use_sliding_window ask for {sorted(set(kinds))}; only full_attention is '
      'supported for pretrained weights'
    )


def _rope(config):
  """(theta, scaling): from rope_parameters (transformers 5), or rope_theta and rope_scaling (before)."""
  given = config.get('rope_parameters') or config.get('rope_scaling') or {}
  theta = given.get('rope_theta', config.get('rope_theta', _ROPE_THETA))
  kind = given.get('rope_type', given.get('type', 'default'))
  _one_of(given, 'partial_rotary_factor', 1.0, (1.0, None))
  if kind not in ('default', 'llama3'):
    raise ValueError(
      f"config.json: rope_scaling of type {kind!r} is not supported, only 'default' and 'llama3'"
    )
  if kind == 'default':
    return float(theta), None
  return float(theta), {ours: _field(given, theirs) for ours, theirs in _ROPE_NAMES.items()}

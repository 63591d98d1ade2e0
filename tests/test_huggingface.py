"""config.json in both directions, and what the decoder does not do."""

import pytest

from sao_jax.models import huggingface
from tests.test_weights import BASE, KINDS, MOE


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'model_type': 'gemma'}, "model_type 'gemma'"),
    ({'model_type': None}, 'model_type None'),
    ({'hidden_size': None}, 'no hidden_size'),
    ({'hidden_act': 'gelu'}, "hidden_act 'gelu'"),
    ({'attention_bias': True}, 'attention_bias True'),
    ({'mlp_bias': True}, 'mlp_bias True'),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor 0.5'),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, "rope_scaling of type 'linear'"),
    ({'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1.0}}, "rope_scaling of type 'yarn'"),
    ({'rope_scaling': {'rope_type': 'llama3', 'factor': 2.0}}, 'no low_freq_factor'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config'),
    ({'layer_types': ['full_attention', 'sliding_attention']}, 'sliding_attention'),
    (
      {'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 1},
      'use_sliding_window',
    ),
    ({'mlp_only_layers': [1]}, 'mlp_only_layers'),
    ({'decoder_sparse_step': 2}, 'decoder_sparse_step 2'),
  ],
)
def test_what_the_decoder_does_not_do_is_refused(change, message):
  config = huggingface.config(KINDS['qwen3'], 'float32', {})
  assert huggingface.arguments(config) == KINDS['qwen3']
  with pytest.raises(ValueError, match=message):
    huggingface.arguments(config | change)


def test_configs_of_both_ages():
  """transformers 5 keeps theta and scaling in rope_parameters, and calls experts local experts."""
  old = huggingface.config(KINDS['llama'], 'float32', {})
  scaling = old['rope_scaling']
  new = {key: value for key, value in old.items() if not key.startswith('rope_')}
  new['rope_parameters'] = scaling | {'rope_theta': 500.0}
  assert huggingface.arguments(new) == KINDS['llama']
  plain = old | {'rope_scaling': {'rope_type': 'default'}}
  assert huggingface.arguments(plain)['rope_scaling'] is None
  moe = huggingface.config(KINDS['qwen3_moe'], 'float32', {})
  moe['num_local_experts'] = moe.pop('num_experts')
  assert huggingface.arguments(moe) == KINDS['qwen3_moe']
  unused = {'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 2}
  assert huggingface.arguments(old | unused) == KINDS['llama']


def test_what_no_config_can_say_is_refused():
  for change in ({'qkv_bias': True, 'qk_norm': True}, MOE | {'qk_norm': False}, {'window': 4}):
    with pytest.raises(ValueError, match='no model type of ours'):
      huggingface.config(BASE | change, 'float32', {})
  with pytest.raises(ValueError, match=r"carried has \['rope_theta'\]"):
    huggingface.config(BASE, 'float32', {'rope_theta': 1.0})

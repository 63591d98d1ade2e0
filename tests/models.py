"""What a small decoder of the tests leaves out."""

PLAIN = {
  'rope_scaling': None,
  'qkv_bias': False,
  'num_experts': 0,
  'experts_per_token': 0,
  'normalize_topk': True,
  'expert_backend': 'blocked',
  'attention': 'xla',
  'attention_chunk': 0,
  'window': 0,
  'sinks': 0,
  'lora_rank': 0,
  'lora_alpha': 0.0,
  'head_dtype': 'float32',
  'mesh': None,
}

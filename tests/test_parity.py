"""Our decoder against transformers on a CPU in float32: tiny random models of every kind, and SmolLM2-135M-Instruct.

The real weights are those of `python experiments/fetch.py SmolLM2-135M-Instruct`, in ./models or where SAO_JAX_MODELS says.
"""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from sao_jax.models import huggingface, transformer, weights
from tests import models

NEEDS = 'parity needs torch and transformers: pip install -e ".[hf]"'
torch = pytest.importorskip('torch', reason=NEEDS)
transformers = pytest.importorskip('transformers', reason=NEEDS)

SIZES = {
  'vocab_size': 50,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-5,
  'max_position_embeddings': 512,
  'bos_token_id': 1,
  'eos_token_id': 2,
  'pad_token_id': 0,
}
# Of the wavelengths 6, 20, 63, 199, ... the first is kept, the second in between, the others are stretched.
LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 10000.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 64,
}
PLAIN_ROPE = {'rope_type': 'default', 'rope_theta': 500.0}
KINDS = {
  'llama3': ('LlamaConfig', {'rope_parameters': LLAMA3, 'head_dim': 16}),
  'llama_tied': ('LlamaConfig', {'rope_parameters': PLAIN_ROPE, 'tie_word_embeddings': True}),
  'qwen2': ('Qwen2Config', {'rope_parameters': PLAIN_ROPE, 'tie_word_embeddings': True}),
  'qwen3': ('Qwen3Config', {'rope_parameters': PLAIN_ROPE, 'head_dim': 16}),
  'qwen3_moe': (
    'Qwen3MoeConfig',
    {'rope_parameters': PLAIN_ROPE, 'head_dim': 8, 'moe_intermediate_size': 24, 'num_experts': 4}
    | {'num_experts_per_tok': 2, 'norm_topk_prob': True},
  ),
}
KINDS['qwen3_moe_raw'] = (
  'Qwen3MoeConfig',
  KINDS['qwen3_moe'][1] | {'num_experts_per_tok': 3, 'norm_topk_prob': False},
)
TOLERANCE = 1e-5  # of the largest logit, and of the log-probabilities in nats per nat
TOKENS = np.random.default_rng(1).integers(0, 50, (2, 12)).astype(np.int32)
GREEDY = 12


def tiny(kind, **changes):
  """A torch model with weights that are large enough to tell a mistake."""
  name, own = KINDS[kind]
  config = getattr(transformers, name)(**SIZES | own | changes)
  theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
  torch.manual_seed(0)
  with torch.no_grad():
    for key, parameter in theirs.named_parameters():
      parameter.normal_(1.0 if 'norm' in key else 0.0, 0.25)
  return theirs


@pytest.fixture(scope='module', params=KINDS)
def pair(request, tmp_path_factory):
  """(torch model, its folder, our model, our parameters) of one kind."""
  theirs = tiny(request.param)
  folder = tmp_path_factory.mktemp('theirs') / request.param
  theirs.save_pretrained(folder)
  return theirs, folder, *ours(folder)


def ours(folder):
  arguments = huggingface.arguments(weights.read_config(folder))
  model = transformer.make(**models.PLAIN | arguments, dtype='float32', remat='none')
  return model, weights.load(folder, jax.eval_shape(model.init, jax.random.key(0)))


def reference(theirs, tokens):
  """[T, V] float64 logits of one sequence, by itself."""
  with torch.no_grad():
    return theirs(torch.tensor(tokens[None].astype(np.int64))).logits[0].double().numpy()


def logits_of(model, params, hidden):
  return np.float64(hidden) @ np.float64(model.unembedding(params)).T


def log_softmax(logits):
  logits = logits - logits.max(axis=-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def differences(got, want):
  """Largest difference of the logits and of the log-probabilities."""
  return np.abs(got - want).max(), np.abs(log_softmax(got) - log_softmax(want)).max()


def assert_close(record, name, got, want):
  logits, logprobs = differences(got, want)
  scale = np.abs(want).max()
  record(name, f'logits {logits:.2e}, log-probabilities {logprobs:.2e}, largest logit {scale:.1f}')
  print(f'{name}: logits {logits:.2e}, log-probabilities {logprobs:.2e}, largest logit {scale:.1f}')
  assert got.shape == want.shape and scale > 1
  assert max(logits, logprobs) <= TOLERANCE * scale


def test_padded_and_packed_rows(pair, record_property):
  """A whole row, a padded one, and two sequences in one row, against runs of each sequence by itself."""
  theirs, _, model, params = pair
  first, second = TOKENS[0, :6], TOKENS[1, 2:6]
  tokens = np.stack([*TOKENS, [*first, *second, 9, 9]]).astype(np.int32)
  segments = np.array([[1] * 12, [1] * 7 + [0] * 5, [1] * 6 + [2] * 4 + [0] * 2], np.int32)
  positions = np.array([range(12), range(12), [*range(6), *range(4), 0, 1]], np.int32)
  got = logits_of(model, params, jax.jit(model.apply)(params, tokens, positions, segments))
  assert_close(record_property, 'whole', got[0], reference(theirs, TOKENS[0]))
  assert_close(record_property, 'padded', got[1, :7], reference(theirs, TOKENS[1, :7]))
  assert_close(record_property, 'packed first', got[2, :6], reference(theirs, first))
  assert_close(record_property, 'packed second', got[2, 6:10], reference(theirs, second))


def test_step_by_step(pair, record_property):
  """Prefill of 5 tokens of one row and 3 of the other, then one token at a time."""
  theirs, _, model, params = pair
  start, one = np.array([5, 3], np.int32), np.ones(2, np.int32)
  extend = jax.jit(model.extend)
  cache = model.init_cache(2, 12)
  hidden, cache = extend(params, cache, TOKENS[:, :5], 0 * start, start)
  got = [[*logits_of(model, params, hidden[row, : start[row]])] for row in range(2)]
  for step in range(7):
    now = start + step
    hidden, cache = extend(params, cache, TOKENS[np.arange(2), now][:, None], now, one)
    for row in range(2):
      got[row].append(logits_of(model, params, hidden[row, 0]))
  for row in range(2):
    want = reference(theirs, TOKENS[row, : start[row] + 7])
    assert_close(record_property, f'row {row}', np.array(got[row]), want)


def test_export_loads_with_the_same_bits(pair, tmp_path):
  theirs, folder, _, params = pair
  config = weights.read_config(folder)
  weights.save(
    tmp_path / 'new',
    params,
    huggingface.arguments(config),
    dtype='float32',
    max_shard_bytes=20_000,
    carried={key: config[key] for key in huggingface.CARRIED},
  )
  assert len(list(tmp_path.glob('new/*.safetensors'))) > 1
  back, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'new', output_loading_info=True
  )
  assert not any(report.values()), report
  want, got = theirs.state_dict(), back.state_dict()
  assert set(got) == set(want)
  for name in want:
    assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name
  assert np.array_equal(reference(back, TOKENS[0]), reference(theirs, TOKENS[0]))
  told, asked = back.config.to_dict(), theirs.config.to_dict()
  kept = {*SIZES, 'rope_parameters', 'tie_word_embeddings', 'num_experts_per_tok', 'norm_topk_prob'}
  kept = (kept & set(asked)) - ({'intermediate_size'} if 'num_experts_per_tok' in asked else set())
  assert {key: told[key] for key in kept} == {key: asked[key] for key in kept}


def test_a_mistake_would_show():
  """Without the scaling of RoPE, transformers itself is a thousand tolerances off."""
  with_scaling = tiny('llama3')
  without = tiny('llama3', rope_parameters={'rope_type': 'default', 'rope_theta': 10000.0})
  want = reference(with_scaling, TOKENS[0])
  assert differences(reference(without, TOKENS[0]), want)[0] > 1000 * TOLERANCE * np.abs(want).max()


@pytest.fixture(scope='module')
def real():
  root = Path(os.environ.get('SAO_JAX_MODELS', Path(__file__).parents[1] / 'models'))
  folder = root / 'SmolLM2-135M-Instruct'
  if not (folder / 'config.json').exists():
    pytest.skip(
      f'THE PARITY OF REAL WEIGHTS IS NOT TESTED: there is no {folder}; run '
      'python experiments/fetch.py SmolLM2-135M-Instruct, or set SAO_JAX_MODELS'
    )
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  questions = ('What is 7 + 8?', 'Write one sentence about tides and the moon.')
  prompts = [
    tokenizer.apply_chat_template(
      [{'role': 'user', 'content': question}], add_generation_prompt=True, return_dict=True
    )['input_ids']
    for question in questions
  ]
  return theirs, *ours(folder), [np.array(prompt, np.int32) for prompt in prompts], folder


def greedy(model, params, prompts):
  """(each prompt with GREEDY tokens more, hidden states [tokens, D] of each): through the cache, after the prompt step by step."""
  lengths, each = np.array([*map(len, prompts)], np.int32), np.arange(len(prompts))
  assert len({*lengths}) > 1  # some are padded
  rows = np.zeros((len(prompts), lengths.max() + GREEDY), np.int32)
  for row, prompt in zip(rows, prompts, strict=True):
    row[: len(prompt)] = prompt
  extend = jax.jit(model.extend, donate_argnums=1)
  table = np.asarray(model.unembedding(params))
  cache = model.init_cache(*rows.shape)
  hidden, cache = extend(params, cache, rows[:, : lengths.max()], 0 * lengths, lengths)
  states = [[*np.asarray(hidden[row, :length])] for row, length in enumerate(lengths)]
  for at in lengths + np.arange(GREEDY, dtype=np.int32)[:, None]:
    rows[each, at] = (np.array([state[-1] for state in states]) @ table.T).argmax(axis=-1)
    hidden, cache = extend(params, cache, rows[each, at][:, None], at, np.ones_like(at))
    for state, new in zip(states, np.asarray(hidden[:, 0]), strict=True):
      state.append(new)
  ends = lengths + GREEDY
  return [row[:end] for row, end in zip(rows, ends, strict=True)], [*map(np.array, states)]


def test_real_weights(real, record_property):
  """Logits and log-probabilities of greedy continuations: step by step, padded, and packed into one row; and the choices."""
  theirs, model, params, prompts, _ = real
  (first, second), states = greedy(model, params, prompts)
  want = [reference(theirs, tokens) for tokens in (first, second)]
  for prompt, tokens, logits in zip(prompts, (first, second), want, strict=True):
    chosen = logits.argmax(axis=-1)[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(tokens[len(prompt) :], chosen)

  # Both in one row of its exact length, and the second in a row that is mostly padding.
  size, a, b = len(first) + len(second), len(first), len(second)
  tokens = np.array([[*first, *second], [*second, *[7] * a]], np.int32)
  segments = np.array([[1] * a + [2] * b, [1] * b + [0] * a], np.int32)
  positions = np.array([[*range(a), *range(b)], range(size)], np.int32)
  hidden = jax.jit(model.apply)(params, tokens, positions, segments)
  found = {
    'step by step': (states, want),
    'packed': ((hidden[0, :a], hidden[0, a:]), want),
    'padded': ((hidden[1, :b],), want[1:]),
  }
  for name, (got, expected) in found.items():
    got = logits_of(model, params, np.concatenate(got))
    assert_close(record_property, f'SmolLM2-135M-Instruct {name}', got, np.concatenate(expected))


def test_real_weights_round_trip(real, tmp_path):
  _, _, params, _, folder = real
  config = weights.read_config(folder)
  weights.save(
    tmp_path / 'new',
    params,
    huggingface.arguments(config),
    dtype='float32',
    max_shard_bytes=10**9,
    carried={key: config[key] for key in huggingface.CARRIED},
    extra_files=[folder / 'tokenizer.json', folder / 'tokenizer_config.json'],
  )
  want = safetensors.numpy.load_file(folder / 'model.safetensors')
  got = safetensors.numpy.load_file(tmp_path / 'new' / 'model.safetensors')
  assert set(got) == set(want) and all(np.array_equal(got[name], want[name]) for name in want)
  assert weights.read_config(tmp_path / 'new') == config

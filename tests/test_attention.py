"""Attention against a float64 loop: every back-end, the ring of keys, rows that lie over devices, scaled rotation."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import attention, backends
from tests.devices import on_eight

# Three segments and padding; one long segment with padding. Positions of padding are anything.
SEGMENTS = np.array([[1] * 6 + [2] * 2 + [3] * 4 + [0], [1] * 11 + [0] * 2], np.int32)
POSITIONS = np.array([[*range(6), 0, 1, *range(4), 9], [*range(11), 3, 0]], np.int32)
ROWS, SIZE, HEADS, GROUPS, HEAD_DIM = 2, 13, 4, 2, 6


def arrays(size=SIZE, groups=GROUPS, rows=ROWS, heads=HEADS, head_dim=HEAD_DIM, dtype=np.float32):
  """q, k, v and a cotangent."""
  rng = np.random.default_rng(0)
  draw = lambda number: jnp.asarray(rng.standard_normal((rows, size, number, head_dim)), dtype)
  return draw(heads), draw(groups), draw(groups), draw(heads)


def packed(q, k, v, positions=POSITIONS, segments=SEGMENTS, **changes):
  defaults = {'backend': 'xla', 'chunk': 4, 'window': 0, 'sinks': 0, 'mesh': None}
  return attention.packed(q, k, v, positions, segments, **{**defaults, **changes})


def outcome(attend, *args):
  """The output and its gradients, for the last argument as cotangent."""
  *inputs, cotangent = args

  @jax.jit
  def run(*inputs):
    out, pull = jax.vjp(attend, *inputs)
    return out, *pull(cotangent.astype(out.dtype))

  return run(*inputs)


def loop(q, k, v, window, sinks, positions=POSITIONS, segments=SEGMENTS):
  """One query, head and key after the other, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for row, t, head in np.ndindex(q.shape[:3]):
    group = head // (q.shape[2] // k.shape[2])
    top, seen = [], []
    for s in range(t + 1):
      back = positions[row, t] - positions[row, s]
      inside = window == 0 or back < window or positions[row, s] < sinks
      if segments[row, s] == segments[row, t] and inside:
        seen.append(s)
        top.append(q[row, t, head] @ k[row, s, group] / math.sqrt(q.shape[3]))
    weights = np.exp(np.array(top) - max(top))
    out[row, t, head] = sum(w * v[row, s, group] for w, s in zip(weights, seen, strict=True))
    out[row, t, head] /= weights.sum()
  return out


@pytest.mark.parametrize(
  'window, sinks, chunk, groups', ((0, 0, 5, 1), (3, 0, 4, 2), (3, 2, 4, 4), (1, 1, 64, 2))
)
def test_back_ends_equal_a_float64_loop_and_each_other_in_gradients(window, sinks, chunk, groups):
  args = arrays(groups=groups)
  attend = functools.partial(packed, window=window, sinks=sinks, chunk=chunk)
  reference = outcome(attend, *args)
  found = outcome(functools.partial(attend, backend='chunked'), *args)
  want = loop(*args[:3], window, sinks)
  for out in (reference[0], found[0]):
    np.testing.assert_allclose(out, want, atol=1e-5)
  for a, b in zip(found[1:], reference[1:], strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  assert np.abs(reference[3]).max() > 0.1


def test_the_reference_has_the_bits_of_the_plain_formula():
  # Default runs must not move: a causal mask with equal segments, -max where it is False, one softmax.
  args = arrays()

  def plain(q, k, v):
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    mask = jnp.tril(jnp.ones((SIZE, SIZE), bool)) & same
    grouped = jnp.moveaxis(q.reshape(ROWS, SIZE, GROUPS, -1, HEAD_DIM), 1, 3)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    scores = jnp.einsum('bkgth,bkch->bkgtc', grouped, k) * HEAD_DIM**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    out = jnp.einsum('bkgtc,bkch->bkgth', jax.nn.softmax(scores), v)
    return jnp.moveaxis(out, 3, 1).reshape(q.shape)

  jax.tree.map(np.testing.assert_array_equal, outcome(packed, *args), outcome(plain, *args))


def test_chunked_in_bfloat16_rounds_like_the_reference():
  # Against the float32 result of the same inputs: about as far off as the reference, values and gradients.
  args = arrays(dtype=jnp.bfloat16)
  exact = outcome(packed, *(x.astype(jnp.float32) for x in args))
  found = outcome(functools.partial(packed, backend='chunked'), *args)
  for a, b, want in zip(found, outcome(packed, *args), exact, strict=True):
    assert a.dtype == b.dtype == jnp.bfloat16
    error, usual = (np.abs(np.asarray(x, np.float32) - want).max() for x in (a, b))
    assert 0 < error < 2 * usual


def test_chunked_never_touches_blocks_that_nobody_sees():
  # Blocks of 4: NaN in the future, in another segment or beyond the window stays where it is, in values and gradients.
  q, k, v, _ = arrays(size=12, rows=1)
  one, three = np.ones((1, 12), np.int32), np.repeat([[1, 2, 3]], 4, axis=1)

  @functools.partial(jax.jit, static_argnames='window')
  def run(k, v, segments, cotangent, window):
    attend = functools.partial(packed, positions=jnp.arange(12)[None], segments=segments)
    out, pull = jax.vjp(functools.partial(attend, backend='chunked', window=window), q, k, v)
    return out, pull(cotangent)[0]

  for segments, window, poisoned, clean in (
    (one, 0, slice(8, 12), slice(0, 8)),
    (three, 0, slice(0, 4), slice(4, 12)),
    (one, 4, slice(0, 4), slice(8, 12)),
  ):
    cotangent = np.zeros(q.shape, np.float32)
    cotangent[:, clean] = 1.0
    bad = [np.array(x) for x in (k, v)]
    for x in bad:
      x[:, poisoned] = np.nan
    for a, b in zip(
      run(k, v, segments, cotangent, window), run(*bad, segments, cotangent, window), strict=True
    ):
      np.testing.assert_array_equal(a[:, clean], b[:, clean])


def test_chunked_memory_grows_with_the_row_and_not_with_its_square():
  # Also where a policy lets the backward pass keep every product that it can.
  def temporary(size):
    shapes = [jax.ShapeDtypeStruct((1, size, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def loss(q, k, v, positions, segments):
      return jnp.sin(packed(q, k, v, positions, segments, backend='chunked', chunk=64)).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return step.lower(*shapes, tokens, tokens).compile().memory_analysis().temp_size_in_bytes

  small, large = temporary(1024), temporary(4096)
  assert 1024 * 4 * 8 * 4 < small < large < 5 * small  # of 16 times the pairs
  assert large < 4096 * 4096


# The ring of keys.


BUCKET = 8


def ring(window, sinks):
  """(params as in `cached`) -> (out, cache) for a bucket of tokens, of which `counts` are real; one program."""
  length = attention.cache_length(SIZE, window=window, sinks=sinks)
  numbers = {'window': window, 'sinks': sinks}
  rows = np.arange(ROWS)[:, None]

  @jax.jit
  def extend(q, k, v, cache, start, counts):
    out = attention.cached(q, k, v, cache, start, **numbers)
    slots = attention.cache_slots(start, BUCKET, length=length, counts=counts, **numbers)
    write = lambda old, new: old.at[rows, :, slots].set(new, mode='drop', unique_indices=True)
    return out, (write(cache[0], k), write(cache[1], v))

  empty = np.full((ROWS, GROUPS, length, HEAD_DIM), np.nan, np.float32)
  return extend, (empty, empty)


def piece(x, start, counts):
  """The bucket of a piece of each row, garbage after it."""
  out = np.full((ROWS, BUCKET, *x.shape[2:]), 7.0, np.float32)
  for row in range(ROWS):
    out[row, : counts[row]] = x[row, start[row] : start[row] + counts[row]]
  return out


@pytest.mark.parametrize('window, sinks', ((0, 0), (1, 1), (4, 2), (40, 2)))
def test_any_pieces_over_the_cache_equal_packed_rows(window, sinks):
  q, k, v = (np.asarray(x) for x in arrays()[:3])
  positions = np.broadcast_to(np.arange(SIZE, dtype=np.int32), (ROWS, SIZE))
  want = loop(q, k, v, window, sinks, positions, np.ones_like(positions))
  extend, empty = ring(window, sinks)
  # Both rows; 0 is a row at rest, beyond the last position. 8 has no padding and is longer than the window.
  for pieces in (
    [(1, 1)] * SIZE,
    [(8, 2), (5, 8), (0, 3)],
    [(2, 5), (8, 1), (0, 1), (1, 0), (2, 6)],
  ):
    cache, done, found = empty, np.zeros(ROWS, np.int32), np.full(q.shape, np.nan)
    for counts in np.array(pieces, np.int32):
      start = np.where(counts, done, SIZE).astype(np.int32)
      out, cache = extend(*(piece(x, start, counts) for x in (q, k, v)), cache, start, counts)
      for row in range(ROWS):
        found[row, done[row] : done[row] + counts[row]] = out[row, : counts[row]]
      done = done + counts
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_a_ring_may_go_back_by_one_position():
  # The engine feeds the last token of a prefix again if the cache holds all of it.
  q, k, v = (np.asarray(x) for x in arrays()[:3])
  extend, cache = ring(4, 2)
  for start, count in ((0, 8), (8, 2), (9, 1), (10, 1)):
    start, counts = np.full(ROWS, start, np.int32), np.full(ROWS, count, np.int32)
    out, cache = extend(*(piece(x, start, counts) for x in (q, k, v)), cache, start, counts)
  positions = np.broadcast_to(np.arange(SIZE), (ROWS, SIZE))
  want = loop(q, k, v, 4, 2, positions, np.ones_like(positions))
  np.testing.assert_allclose(out[:, 0], want[:, 10], atol=1e-5)


def test_cache_slots_by_hand():
  assert attention.cache_length(100, window=0, sinks=0) == 100
  assert attention.cache_length(100, window=3, sinks=2) == 5
  assert attention.cache_length(4, window=3, sinks=2) == 4

  def slots(start, size, counts, window=3, sinks=2):
    counts = None if counts is None else np.array([counts], np.int32)
    start = np.array([start], np.int32)
    numbers = {'length': 5, 'window': window, 'sinks': sinks, 'counts': counts}
    return attention.cache_slots(start, size, **numbers)[0].tolist()

  # Positions 0 and 1 are sinks; 2, 3, 4 live at 2, 3, 4; 5 at 2 again.
  assert slots(0, 6, 5) == [0, 1, 2, 3, 4, 10]
  assert slots(0, 6, 6) == [0, 1, 7, 3, 4, 2]
  assert slots(7, 6, 1) == [4, 6, 7, 8, 9, 10]
  assert slots(7, 6, 0) == [5, 6, 7, 8, 9, 10]  # at rest
  assert slots(3, 6, None, window=0, sinks=0) == [3, 4, 7, 8, 9, 10]
  assert slots(3, 6, 1, window=0, sinks=0) == [3, 6, 7, 8, 9, 10]
  with pytest.raises(ValueError, match='counts'):
    slots(0, 6, None)


# Rotation.


def test_scaled_rotation_by_hand():
  # The bands of Llama 3.1: short waves stay, long ones are 8 times as long, between them linear in turns.
  numbers = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position': 8192}  # fmt: skip
  positions = np.array([[0, 1, 77, 8191]], np.int32)
  kinds = set()
  want = np.zeros((4, 64))
  for i in range(64):
    frequency = 500000.0 ** (-2 * i / 128)
    wave = 2 * math.pi / frequency
    if wave < 8192 / 4:
      kinds.add('short')
    elif wave > 8192 / 1:
      kinds.add('long')
      frequency /= 8
    else:
      kinds.add('between')
      smooth = (8192 / wave - 1) / (4 - 1)
      frequency = (1 - smooth) * frequency / 8 + smooth * frequency
    want[:, i] = positions[0] * frequency
  assert kinds == {'short', 'between', 'long'}
  cos, sin = attention.rotation(positions, head_dim=128, theta=500000.0, scaling=numbers)
  assert cos.dtype == sin.dtype == jnp.float32
  # float32 angles up to 8191: half a unit in the last place is 2.4e-4, and the frequency rounds too.
  np.testing.assert_allclose(cos[0], np.cos(want), atol=3e-3)
  np.testing.assert_allclose(sin[0], np.sin(want), atol=3e-3)
  np.testing.assert_allclose(sin[0, 1], np.sin(want[1]), rtol=2e-6)
  plain = attention.rotation(positions, head_dim=128, theta=500000.0, scaling=None)[1]
  np.testing.assert_allclose(plain[0, 1], np.sin(500000.0 ** (-np.arange(64) / 64)), rtol=2e-6)


@pytest.mark.parametrize(
  'numbers, message',
  (
    ({'factor': 8.0}, 'exactly factor'),
    ({'factor': 8.0, 'low_freq_factor': 4.0, 'high_freq_factor': 1.0, 'original_max_position': 8192}, 'above'),
  ),
)  # fmt: skip
def test_scaling_refuses(numbers, message):
  with pytest.raises(ValueError, match=message):
    attention.rotation(np.zeros((1, 1)), head_dim=4, theta=1e4, scaling=numbers)


# Capabilities.

GPU = {'platform': 'gpu', 'dtype': jnp.bfloat16, 'head_dim': 64, 'window': 0, 'segments': True}


@pytest.mark.parametrize(
  'backend, changes, message',
  (
    ('flash', {}, "'flash' must be one of xla, chunked"),
    ('cudnn', {'platform': 'cpu'}, "'cudnn' cannot run on cpu, only on gpu: use 'chunked'"),
    ('pallas', {'platform': 'cpu'}, 'run on cpu, only on gpu or tpu'),
    ('pallas', {'window': 8}, 'window'),
    ('blind', {}, 'segments'),
    ('cudnn', {'dtype': jnp.float32}, 'float32'),
    ('cudnn', {'head_dim': 60}, 'head_dim 60: no multiple of 8'),
    ('pallas', {'head_dim': 256}, 'head_dim 256: above 128'),
  ),
)
def test_back_ends_refuse_what_they_cannot_do(monkeypatch, backend, changes, message):
  blind = backends.BACKENDS['xla']._replace(segments=False)
  monkeypatch.setitem(backends.BACKENDS, 'blind', blind)
  with pytest.raises(ValueError, match=message):
    backends.check(backend, **{**GPU, **changes})


def test_packed_asks_the_table():
  q, k, v, _ = arrays(dtype=jnp.bfloat16, head_dim=16)
  for backend in ('cudnn', 'pallas'):
    backends.check(backend, **GPU)
    with pytest.raises(ValueError, match='cannot run on cpu'):
      packed(q, k, v, backend=backend)
  with pytest.raises(ValueError, match='attention_chunk is 0'):
    packed(q, k, v, backend='chunked', chunk=0)


# Kernels of other platforms: what they are asked to compute, and that it lowers. They never ran on the hardware.


def test_cudnn_is_asked_for_the_same_attention(monkeypatch):
  plain = jax.nn.dot_product_attention
  asked = []

  def stand_in(*args, implementation, **kwargs):
    asked.append(implementation)
    return plain(*args, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', stand_in)
  q, k, v, _ = arrays()
  tokens = backends.Tokens(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))
  attend = functools.partial(backends.cudnn, chunk=0, window=3, sinks=2)
  out = jax.jit(attend)(q, k, v, tokens, tokens, 0)
  np.testing.assert_allclose(out, loop(q, k, v, 3, 2), atol=1e-5)
  assert asked == ['cudnn']


def test_the_gpu_kernel_interpreted_equals_the_reference():
  pytest.importorskip('jax.experimental.pallas.ops.gpu.attention')
  q, k, v, cotangent = arrays(size=130, rows=1, heads=2, groups=1, head_dim=16)
  segments = jnp.asarray(np.repeat([1, 2, 0], [70, 50, 10])[None], jnp.int32)
  kernel = functools.partial(backends._pallas_gpu, segments=segments, interpret=True)
  attend = functools.partial(packed, positions=segments, segments=segments)
  args = q, k, v, cotangent
  for a, b in zip(outcome(kernel, *args), outcome(attend, *args), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
  'platform, kernel', (('cuda', backends._pallas_gpu), ('tpu', backends._pallas_tpu))
)
def test_kernels_lower_for_their_platform_with_gradients(platform, kernel):
  pytest.importorskip('jax.experimental.pallas.ops')
  q, k, v, _ = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays(size=130, head_dim=64))
  segments = jax.ShapeDtypeStruct((ROWS, 130), jnp.int32)
  loss = lambda *args: kernel(*args).astype(jnp.float32).sum()
  step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  text = step.trace(q, k, v, segments).lower(lowering_platforms=(platform,)).as_text()
  assert text.count('custom_call') >= 2


# Rows over devices.

MESHES = (
  ({'sequence': 8}, 'chunked', 0, 0),
  ({'data': 2, 'sequence': 4}, 'chunked', 5, 2),
  ({'tensor': 2, 'sequence': 4}, 'xla', 0, 0),
  ({'fsdp': 2, 'expert': 2, 'tensor': 2}, 'chunked', 0, 0),
)


def on_devices():
  """Runs in a process with 8 devices. Prints the largest differences to one device, and refusals."""
  from sao_jax import sharding

  size, rows = 24, 4
  segments = np.repeat([[1, 2, 0]], [13, 8, 3], axis=1).repeat(rows, axis=0).astype(np.int32)
  positions = np.concatenate([np.arange(13), np.arange(8), np.zeros(3)]).astype(np.int32)
  tokens = {'positions': np.tile(positions, (rows, 1)), 'segments': segments, 'chunk': 2}
  report = {'errors': [], 'refusals': []}
  args = arrays(size=size, rows=rows)

  @functools.cache
  def result(window, sinks, **changes):
    return outcome(
      functools.partial(packed, window=window, sinks=sinks, **tokens, **changes), *args
    )

  for sizes, backend, window, sinks in MESHES:
    found = result(window, sinks, backend=backend, mesh=sharding.make_mesh(sizes))
    pairs = zip(found, result(window, sinks), strict=True)
    report['errors'].append([float(np.abs(np.asarray(a) - b).max()) for a, b in pairs])
  for sizes, backend in (
    ({'tensor': 4, 'sequence': 2}, 'xla'),
    ({'sequence': 5}, 'chunked'),
    ({'data': 8}, 'chunked'),
    ({'sequence': 8}, 'pallas'),
  ):
    with pytest.raises(ValueError) as refusal:
      attention._check_mesh(sharding.make_mesh(sizes), backend, args[1])
    report['refusals'].append(str(refusal.value))
  print(json.dumps(report))


def test_rows_over_eight_devices_equal_one():
  report = on_eight('from tests import test_attention; test_attention.on_devices()')
  assert len(report['errors']) == len(MESHES)
  for mesh, errors in zip(MESHES, report['errors'], strict=True):
    assert max(errors) < 1e-5, (mesh, errors)
  messages = ('2 num_kv_heads', '24 token positions', '4 rows', "'pallas' cannot cut a row")
  for message, found in zip(messages, report['refusals'], strict=True):
    assert message in found

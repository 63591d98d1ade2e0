"""What stands on a decoder's last hidden states: token log-probabilities, and value heads. Pure functions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sao_jax import critics

Head = dict[str, jax.Array]


def token_logprobs(
  hidden: jax.Array,
  unembedding: jax.Array,
  tokens: jax.Array,
  *,
  temperature: float | jax.Array,
  chunk: int,
  entropy: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """log softmax(hidden @ unembedding.T / temperature) at the given tokens, without ever holding [N, V].

  Rows are taken `chunk` at a time, forward and backward; the backward pass computes the logits again. Products have
  the operands' common type and accumulate in float32, as do the sums over chunks; softmax is in float32.
  A row whose cotangents are 0 gives no gradient, even if its hidden state is NaN (padding).

  Args:
    hidden: [N, D], float32 or bfloat16.
    unembedding: [V, D].
    tokens: [N] int. Out of range gives NaN.
    temperature: > 0, number or scalar array; that of sampling.
    chunk: >= 1, rows whose [chunk, V] logits are alive at once. N needs not be a multiple.
    entropy: also return the entropy of each distribution.

  Returns:
    [N] float32 nats, or (log-probabilities [N], entropy [N]). Differentiable in hidden, unembedding and temperature.

  Raises:
    ValueError: if chunk is below 1 or temperature is a number that is not positive.
  """
  if chunk < 1:
    raise ValueError(f'chunk is {chunk}: must be at least 1 row')
  if isinstance(temperature, (int, float)) and not temperature > 0:
    raise ValueError(
      f'temperature is {temperature}: must be > 0; greedy choice has no log-probability'
    )
  hidden, unembedding, tokens = (jnp.asarray(x) for x in (hidden, unembedding, tokens))
  temperature = jnp.asarray(temperature, jnp.float32)
  chex.assert_rank([hidden, unembedding, tokens, temperature], [2, 2, 1, 0])
  chex.assert_equal_shape_suffix([hidden, unembedding], 1)
  chex.assert_equal_shape_prefix([hidden, tokens], 1)
  chunk = min(chunk, max(len(tokens), 1))
  # Columns of chunk rows: each takes rows from all over N, so that rows which are sharded over devices stay where they are.
  columns = -(-max(len(tokens), 1) // chunk)

  def fold(x):
    x = jnp.pad(x, ((0, chunk * columns - len(x)),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(chunk, columns, *x.shape[1:])

  out = _blocks(fold(hidden), unembedding, fold(tokens), temperature, columns, 1, entropy)
  logprobs, entropies = (x.reshape(-1)[: len(tokens)] for x in out)
  return (logprobs, entropies) if entropy else logprobs


def action_logprobs(
  hidden: jax.Array,
  unembedding: jax.Array,
  tokens: jax.Array,
  mask: jax.Array,
  *,
  temperature: float | jax.Array,
  chunk: int,
  parts: int,
) -> tuple[jax.Array, jax.Array]:
  """`token_logprobs` and entropies of the tokens of a mask: the cost is theirs, not that of the rows.

  The actions of each row are gathered to its front first. The loop over blocks of columns ends after the fullest row.

  Args:
    hidden: [B, T, D]; anything where mask is 0, NaN too.
    unembedding: [V, D].
    tokens: [B, T] int.
    mask: [B, T], non-zero on the tokens that are wanted.
    temperature, chunk: as in `token_logprobs`.
    parts: of a row, which are gathered by themselves; the devices that T lies over.

  Returns:
    (log-probabilities, entropies), each [B, T] float32 nats, 0 where mask is 0.
  """
  rows, length = tokens.shape
  split = lambda x: x.reshape(rows * parts, length // parts, *x.shape[2:])
  wanted = split(mask) > 0
  order = jnp.argsort(~wanted, axis=1, stable=True)
  take = lambda x: jnp.take_along_axis(x, order, axis=1)
  hidden = jnp.take_along_axis(split(hidden), order[..., None], axis=1)
  size = order.shape[1]
  columns = min(size, max(1, chunk // len(order)))
  rest = -size % columns
  pad = lambda x: jnp.pad(x, ((0, 0), (0, rest)) + ((0, 0),) * (x.ndim - 2))
  out = _blocks(
    pad(hidden),
    unembedding,
    pad(take(split(tokens))),
    jnp.asarray(temperature, jnp.float32),
    wanted.sum(axis=1).max(),
    columns,
    True,
  )
  back = jnp.argsort(order, axis=1)
  put = lambda x: jnp.where(wanted, jnp.take_along_axis(x[:, :size], back, axis=1), 0)
  return tuple(put(x).reshape(rows, length) for x in out)


def init_scalar_head(width: int, mean_return: float) -> Head:
  """A value head that starts as the mean return of recent rollouts: zero kernel, bias = that mean.

  Args:
    width: D of the decoder.
    mean_return: in units of the return.

  Returns:
    {'kernel': [D, 1], 'bias': [1]} float32.

  Source: rollout-aware initialisation, SAO, arXiv 2607.07508.
  """
  return {'kernel': jnp.zeros((width, 1)), 'bias': jnp.full((1,), mean_return, jnp.float32)}


def scalar_values(head: Head, hidden: jax.Array) -> jax.Array:
  """[..., D] -> [...] float32. No temperature: it belongs to sampling."""
  return _affine(head, hidden)[..., 0]


def init_categorical_head(
  width: int, mean_return: float, *, low: float, high: float, num_bins: int
) -> Head:
  """A categorical value head whose expected value starts as the mean return: zero kernel, smooth bias.

  The bias is slope * atom, the flattest distribution (largest entropy) with that mean, so that every bin starts with
  some probability. At an end of the support the mean needs an infinite slope; it is kept under 12 nats a bin, which
  misses the end by less than 1e-5 of a bin.

  Args:
    width: D of the decoder.
    mean_return: in [low, high].
    low: the lowest atom, as in `critics`.
    high: the highest.
    num_bins: number of atoms.

  Returns:
    {'kernel': [D, num_bins], 'bias': [num_bins]} float32.

  Raises:
    ValueError: if mean_return is outside the support.
  """
  support = np.asarray(critics.atoms(low, high, num_bins), np.float64)
  if not low <= mean_return <= high:
    raise ValueError(f'mean_return is {mean_return}, outside [{low}, {high}]: widen the support')
  steps = np.arange(num_bins) - (num_bins - 1) / 2
  flattest, steepest = -12.0, 12.0
  for _ in range(60):  # the mean grows with the slope: bisect
    slope = (flattest + steepest) / 2
    weights = np.exp(slope * steps - abs(slope) * (num_bins - 1) / 2)
    if weights @ support < mean_return * weights.sum():
      flattest = slope
    else:
      steepest = slope
  bias = jnp.asarray(slope * steps, jnp.float32)
  return {'kernel': jnp.zeros((width, num_bins)), 'bias': bias}


def categorical_logits(head: Head, hidden: jax.Array) -> jax.Array:
  """[..., D] -> [..., num_bins] float32; see `critics.expected_value`."""
  return _affine(head, hidden)


def _affine(head, hidden):
  kernel, bias = (head[name].astype(jnp.float32) for name in ('kernel', 'bias'))
  product = jnp.matmul(hidden.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
  return product + bias


def _dot(equation, x, y):
  """Product with float32 accumulation, and no shortened operands (TF32, bfloat16) for float32."""
  return jnp.einsum(
    equation, x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )


def _log_softmax(hidden, unembedding, temperature):
  """[R, c, V]. Relative to the largest logit, so that a probability near 1 keeps its digits."""
  return jax.nn.log_softmax(_dot('rcd,vd->rcv', hidden, unembedding) / temperature)


def _chosen(tokens, size):
  """[R, c, V] bool. A comparison that fuses with its use, and works on a sharded V."""
  return tokens[..., None] == jnp.arange(size)


def _plogp(logprobs):
  """p log p, 0 at p = 0."""
  probs = jnp.exp(logprobs)
  return jnp.where(probs > 0, probs * logprobs, 0.0)


def _blocks(hidden, unembedding, tokens, temperature, count, columns, entropy):
  """(log-probabilities, entropies or zeros), each [R, C], of the first `count` columns at least; what is after is 0.

  [R, C, D] and [R, C] are taken `columns` columns at a time; C is a multiple of that.
  """
  dtype = jnp.promote_types(hidden.dtype, unembedding.dtype)
  blocks = (jnp.asarray(count, jnp.int32) + columns - 1) // columns
  return _logprobs(
    hidden.astype(dtype),
    unembedding.astype(dtype),
    tokens,
    temperature,
    blocks,
    columns,
    entropy,
  )


def _block(x, index, columns):
  return jax.lax.dynamic_slice_in_dim(x, index * columns, columns, axis=1)


def _put(x, block, index):
  return jax.lax.dynamic_update_slice_in_dim(x, block, index * block.shape[1], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _logprobs(hidden, unembedding, tokens, temperature, blocks, columns, entropy):
  size = len(unembedding)

  def one(index, out):
    words = _block(tokens, index, columns)
    logprobs = _log_softmax(_block(hidden, index, columns), unembedding, temperature)
    valid = (words >= 0) & (words < size)
    logprob = jnp.where(_chosen(words, size), logprobs, 0.0).sum(axis=-1)
    logprob = jnp.where(valid, logprob, jnp.nan)
    if entropy:
      return _put(out[0], logprob, index), _put(out[1], -_plogp(logprobs).sum(axis=-1), index)
    return _put(out[0], logprob, index), out[1]

  zeros = jnp.zeros(tokens.shape, jnp.float32)
  return jax.lax.fori_loop(0, blocks, one, (zeros, zeros))


def _forward(hidden, unembedding, tokens, temperature, blocks, columns, entropy):
  out = _logprobs(hidden, unembedding, tokens, temperature, blocks, columns, entropy)
  return out, (hidden, unembedding, tokens, temperature, blocks)


def _backward(columns, entropy, residuals, cotangents):
  hidden, unembedding, tokens, temperature, blocks = residuals
  size, dtype = len(unembedding), hidden.dtype

  def one(index, carry):
    d_hidden, d_unembedding, d_temperature = carry
    words, d_logprob, d_entropy = (_block(x, index, columns) for x in (tokens, *cotangents))
    used = (d_logprob != 0) | (d_entropy != 0)
    states = jnp.where(used[..., None], _block(hidden, index, columns), 0)
    logprobs = _log_softmax(states, unembedding, temperature)
    probs = jnp.exp(logprobs)
    # d logprob / d logits = onehot - p
    d_logits = d_logprob[..., None] * (_chosen(words, size) - probs)
    if entropy:  # d entropy / d logits = -p (log p + entropy)
      plogp = _plogp(logprobs)
      d_logits -= d_entropy[..., None] * (plogp - probs * plogp.sum(axis=-1, keepdims=True))
    # d_logits of a row add up to 0, so log-probabilities serve as logits here.
    d_temperature -= (d_logits * logprobs).sum() / temperature
    d_products = (d_logits / temperature).astype(dtype)
    d_unembedding += _dot('rcv,rcd->vd', d_products, states)
    d_states = _dot('rcv,vd->rcd', d_products, unembedding).astype(dtype)
    return _put(d_hidden, d_states, index), d_unembedding, d_temperature

  zero = jnp.zeros_like(hidden), jnp.zeros(unembedding.shape, jnp.float32), jnp.zeros(())
  d_hidden, d_unembedding, d_temperature = jax.lax.fori_loop(0, blocks, one, zero)
  return d_hidden, d_unembedding.astype(dtype), None, d_temperature, None


_logprobs.defvjp(_forward, _backward)

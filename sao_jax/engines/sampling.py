"""Sampling on device: one token a row, from the full distribution, with its log-probability."""

import jax
import jax.numpy as jnp


def sample(
  logits: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Samples from softmax(logits / temperature).

  The key of a row is fold_in(key(seed), position), so that a token depends on its request and its place and not on
  its neighbours, its slot or the number of steps a call makes. There is no top-k, top-p or min-p: the recorded
  log-probability is that of the distribution sampled from, which the learner can compute again.

  Args:
    logits: [S, V] float32.
    temperature: [S] float32, > 0.
    seeds: [S] uint32.
    positions: [S] int32, the position that the sampled token will have.

  Returns:
    Tokens [S] int32, and their float32 log-probabilities [S] in nats after temperature.
  """
  logprobs = jax.nn.log_softmax(logits / temperature[:, None], axis=-1)
  keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))
  tokens = jax.vmap(jax.random.categorical)(keys(seeds, positions), logprobs)
  chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32), chosen

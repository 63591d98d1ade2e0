"""The device side of the local engine: its state, and the few programs that change it, compiled ahead.

A program is compiled for fixed shapes and devices. Anything else is an error and never a silent recompilation.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sao_jax import sharding, types
from sao_jax.engines import sampling


@flax.struct.dataclass
class State:
  """What the device knows of the slots. Donated to every program. Leaves are [S] except for the cache."""

  cache: Any  # of S rows and C positions, see types.Model
  tokens: jax.Array  # int32, the last token; its keys and values are not in the cache yet
  lengths: jax.Array  # int32, tokens known: the next one has this position
  remaining: jax.Array  # int32, tokens that may still be sampled
  active: jax.Array  # bool
  temperature: jax.Array  # float32
  seeds: jax.Array  # uint32


class Rows(NamedTuple):
  """One prefill call: R pieces of prefixes. Unused rows have slot S."""

  slots: np.ndarray  # [R] int32
  tokens: np.ndarray  # [R, bucket] int32, 0 after `counts`
  starts: np.ndarray  # [R] int32, position of the first token
  counts: np.ndarray  # [R] int32, >= 1
  last: np.ndarray  # [R] bool: the piece ends the prefix, so that a token is sampled after it
  remaining: np.ndarray  # [R] int32, max_new_tokens
  temperature: np.ndarray  # [R] float32
  seeds: np.ndarray  # [R] uint32


class Programs(NamedTuple):
  """What `make_programs` compiled, and for what. Stateless: engines may share it."""

  init_state: Callable  # () -> State
  prefill: dict[int, Callable]  # bucket -> (params, State, Rows) -> (State, ([R] tokens, logprobs))
  decode: Callable  # (params, State, keep [S] bool) -> (State, ([steps, S] tokens, logprobs))
  params: Any  # shapes, dtypes and shardings of the parameters
  num_slots: int
  max_length: int
  prefill_rows: int
  stop_tokens: frozenset[int]
  vocab_size: int
  launch: AbstractContextManager  # held while a program is launched


def make_programs(
  model: types.Model,
  params: Any,
  *,
  num_slots: int,
  max_length: int,
  decode_steps: int,
  prefill_rows: int,
  prefill_buckets: Sequence[int],
  stop_tokens: Sequence[int],
  mesh: Mesh | None = None,
  launch: AbstractContextManager | None = None,
) -> Programs:
  """Compiles a prefill for each bucket and a decode.

  Args:
    model: the decoder.
    params: its parameters, or their shapes; only shapes and dtypes are read, and with a mesh their shardings.
    num_slots: S, sequences decoded together.
    max_length: C, positions of a slot: prefix and new tokens.
    decode_steps: tokens a slot samples between two looks of the host.
    prefill_rows: R, prefixes prefilled by one call.
    prefill_buckets: widths of the prefill calls; a longer prefix is prefilled in pieces of the widest.
    stop_tokens: a sampled one ends the generation.
    mesh: of this process's devices, where the engine lives: its cache is cut over 'expert' by slots and over 'tensor' by heads. None: the first local device.
    launch: a lock for all threads that launch programs on the mesh; None: there is no other.

  Raises:
    ValueError: if a size is not positive, a bucket exceeds max_length, or a stop token is no token.
  """
  buckets = sorted(set(prefill_buckets))
  if min(num_slots, max_length, decode_steps, prefill_rows, *buckets, 1) < 1 or not buckets:
    raise ValueError('num_slots, max_length, decode_steps, prefill_rows and buckets must be >= 1')
  if buckets[-1] > max_length:
    raise ValueError(f'prefill bucket {buckets[-1]} exceeds max_length {max_length}')
  if not all(0 <= token < model.vocab_size for token in stop_tokens):
    raise ValueError(f'stop_tokens {stop_tokens} must be in [0, {model.vocab_size})')
  alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  everywhere = alone if mesh is None else sharding.everywhere(mesh)

  def like(x, where=everywhere):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  stops = jnp.asarray(sorted(stop_tokens), jnp.int32)

  init = lambda: _init_state(model, num_slots, max_length)
  state = jax.tree.map(like, jax.eval_shape(init))
  if mesh is None:
    params = jax.tree.map(like, params)
  else:
    # [L, S, K, C, head_dim]
    cut = NamedSharding(mesh, PartitionSpec(None, 'expert', 'tensor'))
    state = state.replace(cache=jax.tree.map(lambda x: like(x, cut), state.cache))
  placed = jax.tree.map(lambda x: x.sharding, state)
  init_state = jax.jit(init, out_shardings=placed)

  def compile_ahead(function, rest):
    jitted = jax.jit(function, donate_argnums=1, out_shardings=(placed, everywhere))
    return jitted.lower(params, state, rest).compile()

  return Programs(
    init_state=init_state.lower().compile(),
    prefill={
      bucket: compile_ahead(_prefill(model, stops), empty_rows(num_slots, prefill_rows, bucket))
      for bucket in buckets
    },
    decode=compile_ahead(
      _decode(model, stops, decode_steps, max_length), np.zeros(num_slots, bool)
    ),
    params=params,
    num_slots=num_slots,
    max_length=max_length,
    prefill_rows=prefill_rows,
    stop_tokens=frozenset(stop_tokens),
    vocab_size=model.vocab_size,
    launch=launch or contextlib.nullcontext(),
  )


def empty_rows(num_slots: int, rows: int, bucket: int) -> Rows:
  """A prefill call that does nothing."""
  return Rows(
    slots=np.full(rows, num_slots, np.int32),
    tokens=np.zeros((rows, bucket), np.int32),
    starts=np.zeros(rows, np.int32),
    counts=np.ones(rows, np.int32),
    last=np.zeros(rows, bool),
    remaining=np.zeros(rows, np.int32),
    temperature=np.ones(rows, np.float32),
    seeds=np.zeros(rows, np.uint32),
  )


def check_request(programs: Programs, request: types.Request) -> None:
  """Raises ValueError for a request that the programs cannot meet."""
  tokens = np.asarray(request.tokens)
  if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype.kind not in 'iu':
    raise ValueError(f'tokens must be a non-empty row of ids, got {tokens.dtype}{tokens.shape}')
  if tokens.min() < 0 or tokens.max() >= programs.vocab_size:
    raise ValueError(f'tokens must be in [0, {programs.vocab_size}), got {tokens}')
  if request.max_new_tokens < 1:
    raise ValueError(f'max_new_tokens must be >= 1, got {request.max_new_tokens}')
  if len(tokens) + request.max_new_tokens > programs.max_length:
    raise ValueError(
      f'prefix {len(tokens)} + max_new_tokens {request.max_new_tokens} exceed the '
      f'{programs.max_length} positions of a slot: ask for fewer, or raise max_length'
    )
  if not 0 < request.temperature < float('inf'):
    raise ValueError(f'temperature must be finite and > 0, got {request.temperature}')
  if not 0 <= request.seed < 2**32:
    raise ValueError(f'seed must be in [0, 2^32), got {request.seed}')


def _init_state(model, num_slots, max_length):
  zeros = functools.partial(jnp.zeros, num_slots)
  return State(
    cache=model.init_cache(num_slots, max_length),
    tokens=zeros(jnp.int32),
    lengths=zeros(jnp.int32),
    remaining=zeros(jnp.int32),
    active=zeros(bool),
    temperature=jnp.ones(num_slots, jnp.float32),
    seeds=zeros(jnp.uint32),
  )


def _logits(model, params, hidden):
  """[S, V] float32 for hidden [S, D], as `models.heads` computes them for the learner."""
  table = model.unembedding(params)
  dtype = jnp.promote_types(hidden.dtype, table.dtype)
  return jnp.einsum(
    'sd,vd->sv',
    hidden.astype(dtype),
    table.astype(dtype),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def _prefill(model, stops):
  def prefill(params, state: State, rows: Rows):
    size = state.active.shape[0]
    part = jax.tree.map(lambda x: x.at[:, rows.slots].get(mode='clip'), state.cache)
    hidden, part = model.extend(params, part, rows.tokens, rows.starts, rows.counts)
    final = jnp.take_along_axis(hidden, rows.counts[:, None, None] - 1, axis=1)[:, 0]
    ends = rows.starts + rows.counts
    logits = _logits(model, params, final)
    tokens, logprobs = sampling.sample(logits, rows.temperature, rows.seeds, ends)
    remaining = rows.remaining - 1
    sampling_slots = jnp.where(rows.last, rows.slots, size)

    def put_rows(x, new):
      return x.at[:, rows.slots].set(new, mode='drop')

    def put(x, new):
      return x.at[sampling_slots].set(new, mode='drop')

    state = State(
      cache=jax.tree.map(put_rows, state.cache, part),
      tokens=put(state.tokens, tokens),
      lengths=put(state.lengths, ends + 1),
      remaining=put(state.remaining, remaining),
      active=put(state.active, (remaining > 0) & ~jnp.isin(tokens, stops)),
      temperature=put(state.temperature, rows.temperature),
      seeds=put(state.seeds, rows.seeds),
    )
    return state, (tokens, logprobs)

  return prefill


def _decode(model, stops, steps, max_length):
  def one(params, state: State):
    moved = state.active.astype(jnp.int32)  # a slot at rest writes nothing
    start = jnp.where(state.active, state.lengths - 1, max_length)
    hidden, cache = model.extend(params, state.cache, state.tokens[:, None], start, moved)
    logits = _logits(model, params, hidden[:, 0])
    tokens, logprobs = sampling.sample(logits, state.temperature, state.seeds, state.lengths)
    tokens = jnp.where(state.active, tokens, -1)
    remaining = state.remaining - moved
    after = state.replace(
      cache=cache,
      tokens=jnp.where(state.active, tokens, state.tokens),
      lengths=state.lengths + moved,
      remaining=remaining,
      active=state.active & (remaining > 0) & ~jnp.isin(tokens, stops),
    )
    return after, tokens, logprobs

  def decode(params, state: State, keep):
    size = keep.shape[0]

    def body(carry):
      step, state, tokens, logprobs = carry
      state, new_tokens, new_logprobs = one(params, state)
      return step + 1, state, tokens.at[step].set(new_tokens), logprobs.at[step].set(new_logprobs)

    carry = (
      0,
      state.replace(active=state.active & keep),
      jnp.full((steps, size), -1, jnp.int32),
      jnp.zeros((steps, size), jnp.float32),
    )

    def go_on(carry):
      return (carry[0] < steps) & carry[1].active.any()

    _, state, tokens, logprobs = jax.lax.while_loop(go_on, body, carry)
    return state, (tokens, logprobs)

  return decode

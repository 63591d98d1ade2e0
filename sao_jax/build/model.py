"""The model of a run: its chat format, its weights, and where they lie."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from sao_jax import chats, sharding, tokens
from sao_jax.build.meshes import meshes
from sao_jax.learner import TrainState
from sao_jax.models import huggingface, lora, moe, transformer, weights
from sao_jax.runtime.crew import gathered
from sao_jax.types import Batch, Model

# Leaves that an engine reads in the compute dtype alone; router and norms are read in float32, tables in that of the head.
_CAST = r'layers/(attention|mlp)/\w+/(kernel|bias|lora_a|lora_b)|layers/moe/(gate|up|down)/kernel'
_TABLES = r'embed/embedding|unembed/kernel'
_NOT_OURS = (
  'weights',
  'upcycle',
  'router_stddev',
)  # of the section, what `transformer.make` does not take


@dataclasses.dataclass(frozen=True)
class ModelParts:
  """Pure functions of one architecture, for the learner and for the engine."""

  chat: tokens.ChatFormat
  model: Model  # on the learner's mesh
  engine_model: Model
  mesh: Mesh | None  # of the learner; None: one device for everything
  engine_mesh: Mesh | None
  init: Callable[
    [int], Any
  ]  # seed -> params on the learner's mesh, read from files if the config names some
  export: Callable[[TrainState], Any]  # a copy of the policy as engines take it; see `_export`
  exported: Any  # its shapes and dtypes
  launch: (
    AbstractContextManager  # around the launch of a program over several devices, see `model_parts`
  )

  def place(self, batch: Batch) -> Batch:
    """A batch of the host, the same in every process, as the learner takes it."""
    if self.mesh is None:
      return batch
    return sharding.put(batch, jax.tree.map(lambda x: sharding.rows(self.mesh, x.ndim), batch))


def chat_format(c: ConfigDict) -> tokens.ChatFormat:
  """Raises ValueError: a folder without a tokenizer, or one without the markers of the format."""
  if c.chat.format == 'bytes':
    return tokens.BYTE_CHAT
  try:
    tokenizer = chats.load_tokenizer(c.chat.tokenizer or c.model.weights)
  except ImportError as error:
    raise ValueError(f"chat.format={c.chat.format!r}: {error}: pip install -e '.[hf]'") from error
  if c.chat.format == 'smollm2':
    return chats.smollm2(
      tokenizer, system=c.chat.system, prefill=c.chat.prefill, tools=c.chat.tools
    )
  return chats.qwen3(tokenizer, system=c.chat.system, thinking=c.chat.thinking, tools=c.chat.tools)


def model_parts(c: ConfigDict) -> ModelParts:
  """The model of a run.

  Programs of several devices that are launched by two threads at once may start in one order on one device and in the other on
  another, and then their collectives wait for each other for ever. So the learner and both engines launch under one lock, which is
  not held while they run.

  Raises:
    ValueError: numbers of the config that do not fit each other, the weights or the devices.
  """
  chat = chat_format(c)
  mesh, engine_mesh = meshes(c)
  shape = shape_of(c, chat.vocab_size)
  try:
    model = transformer.make(**shape, mesh=mesh)
  except ValueError as error:
    raise ValueError(f'model.{error}') from error
  engine_model = transformer.make(**shape, mesh=engine_mesh)
  if c.model.weights:
    _check_weights(c, shape)
  launch = contextlib.nullcontext() if mesh is None else threading.Lock()
  export = _export(c, engine_mesh, launch)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  exported = jax.eval_shape(functools.partial(_as_exported, c), shapes)
  if engine_mesh is not None:
    try:
      where = sharding.tree_shardings(exported, engine_mesh)
    except ValueError as error:
      raise ValueError(
        f'engine.tensor={c.engine.tensor}, engine.expert={c.engine.expert}: {error}'
      ) from error
    exported = sharding.with_shardings(exported, where)
  return ModelParts(
    chat=chat,
    model=model,
    engine_model=engine_model,
    mesh=mesh,
    engine_mesh=engine_mesh,
    init=functools.partial(_init, c, shape, model, mesh),
    export=export,
    exported=exported,
    launch=launch,
  )


def not_exportable(c: ConfigDict, vocab_size: int) -> str:
  """Why experiments/export.py cannot write this model; '' if it can."""
  try:
    huggingface.config(shape_of(c, vocab_size), 'float32', {})
  except ValueError as error:
    return str(error)
  return ''


def shape_of(c: ConfigDict, vocab_size: int) -> dict[str, Any]:
  """The arguments of `transformer.make`, but for the mesh."""
  shape = {name: value for name, value in c.model.items() if name not in _NOT_OURS}
  scaling = c.model.rope_scaling.to_dict()
  shape['rope_scaling'] = scaling if scaling['factor'] else None
  shape['vocab_size'] = c.model.vocab_size or vocab_size
  if shape['vocab_size'] < vocab_size:
    raise ValueError(
      f'model.vocab_size={c.model.vocab_size} must be at least the {vocab_size} of the tokenizer'
    )
  return shape


def _check_weights(c: ConfigDict, shape: dict[str, Any]) -> None:
  """The folder must be of the architecture that the config states, so that a config tells what it trains."""
  config = weights.read_config(c.model.weights)
  there = huggingface.arguments(config)
  if c.model.upcycle:
    if there['num_experts']:
      raise ValueError(
        f'model.upcycle=True, and model.weights={c.model.weights} has {there["num_experts"]} experts already: set it to False'
      )
    there |= {name: shape[name] for name in ('num_experts', 'experts_per_token', 'normalize_topk')}
  for name, value in there.items():
    if shape[name] != value and (
      there['num_experts'] or name not in ('experts_per_token', 'normalize_topk')
    ):
      raise ValueError(
        f'model.{name}={shape[name]} and the model of model.weights={c.model.weights} has {value}: use that'
      )
  known = config.get('max_position_embeddings', math.inf)
  if c.env.max_tokens > known:
    raise ValueError(
      f'env.max_tokens={c.env.max_tokens} and the model of model.weights={c.model.weights} knows {known} positions: lower it'
    )
  try:
    weights.check(c.model.weights, _plain_shapes(c, shape))
  except ImportError as error:
    raise ValueError(f"model.weights={c.model.weights}: {error}: pip install -e '.[hf]'") from error


def _plain_shapes(c: ConfigDict, shape: dict[str, Any]) -> Any:
  """Of what the files hold: no adapters, and one MLP where that becomes every expert."""
  plain = {'lora_rank': 0, **({'num_experts': 0} if c.model.upcycle else {})}
  model = transformer.make(**{**shape, **plain}, mesh=None)
  return jax.eval_shape(model.init, jax.random.key(0))


def _init(c: ConfigDict, shape: dict[str, Any], model: Model, mesh: Mesh | None, seed: int) -> Any:
  key = jax.random.key(seed)

  def build(function, *args):
    """`function(key, *args)`, made where it belongs."""
    if mesh is None:
      return jax.jit(function)(key, *args)
    placed = sharding.tree_shardings(jax.eval_shape(function, key, *args), mesh)
    return jax.jit(function, out_shardings=placed)(key, *args)

  if not c.model.weights:
    return build(model.init)
  like = _plain_shapes(c, shape)
  if mesh is not None:
    like = sharding.with_shardings(like, sharding.tree_shardings(like, mesh))
  params = weights.load(c.model.weights, like)
  if c.model.upcycle:
    how = {'num_experts': c.model.num_experts, 'router_stddev': c.model.router_stddev}
    params = build(
      lambda key, params: moe.upcycle(params, key=jax.random.fold_in(key, 1), **how), params
    )
  if c.model.lora_rank:
    params = lora.join(params, build(lambda key: lora.split(model.init(key))[1]))
  return params


def _as_exported(c: ConfigDict, params: Any) -> Any:
  """Rounded as the learner rounds it. Adapters stay by themselves: added to a kernel in bfloat16 small ones would vanish."""

  def cast(keys, x):
    path = sharding.path_of(keys)
    if sharding.matches(_TABLES, path):
      return x.astype(c.model.head_dtype)
    return x.astype(c.model.dtype) if sharding.matches(_CAST, path) else x

  return jax.tree.map_with_path(cast, params)


def _export(
  c: ConfigDict, engine_mesh: Mesh | None, launch: AbstractContextManager
) -> Callable[[TrainState], Any]:
  """What makes the engine's copy. Over several processes all call it, and process 0, which has the engines, gets it: beside
  the cast copy, cut as the learner's, at most one leaf at a time lies whole on each device.
  """

  @jax.jit
  def copy(base, policy):
    # Without jnp.copy, jit would hand on buffers that the learner donates at the next update.
    return _as_exported(c, jax.tree.map(jnp.copy, lora.join(base, policy)))

  def export(state: TrainState) -> Any:
    with launch:
      params = copy(state.base, state.policy)
      if engine_mesh is None:
        return params
      where = sharding.tree_shardings(params, engine_mesh)
      if jax.process_count() == 1:
        return jax.device_put(params, where)
    return jax.tree.map(to_leader, params, where)

  def to_leader(leaf, where):
    whole = gathered(leaf, launch)
    return jax.block_until_ready(jax.device_put(whole, where)) if jax.process_index() == 0 else None

  return export


def state_shardings(c: ConfigDict, shapes: TrainState, mesh: Mesh) -> TrainState:
  """Where everything that an update changes lies between updates."""
  shardings = sharding.tree_shardings(shapes.replace(errors={}), mesh)

  def of_error(sharding, error):
    return None if error is None else NamedSharding(mesh, PartitionSpec('data', *sharding.spec))

  owed = {
    name: jax.tree.map(of_error, getattr(shardings, name), errors)
    for name, errors in shapes.errors.items()
  }
  kind = c.train.optimizer_memory
  opts = {
    name: sharding.tree_shardings(getattr(shapes, name), mesh, memory_kind=kind)
    for name in ('policy_opt', 'critic_opt')
  }
  return shardings.replace(errors=owed, **opts)

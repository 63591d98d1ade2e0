"""Weights from and to a Hugging Face folder: config.json beside safetensors, one file or several with an index.

Each device's part of a parameter is read on its own, layer by layer, in the dtype that is wanted: the host never holds a whole
parameter that is sharded. Writing holds one layer of one parameter and one file.
"""

import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax import sharding
from sao_jax.models import huggingface

FILE, INDEX, CONFIG = 'model.safetensors', 'model.safetensors.index.json', 'config.json'
READABLE = ('F64', 'F32', 'F16', 'BF16')


class WeightsError(ValueError):
  """The folder does not hold the weights of this model. The message names every tensor that is wrong."""


def read_config(folder: Path | str) -> dict[str, Any]:
  """The parsed config.json of a folder. Raises WeightsError."""
  return _read_json(Path(folder) / CONFIG)


def load(folder: Path | str, like: Any) -> Any:
  """The parameters of a Hugging Face folder.

  Args:
    folder: holds model.safetensors, or model.safetensors.index.json and the files that it names.
    like: pytree of jax.ShapeDtypeStruct in the tree of `transformer.make`, without what no checkpoint has (value heads, LoRA).
      A leaf with a sharding is put there, one without on the default device. A tree without `unembed` is a tied model.

  Returns:
    Arrays in the tree, shapes, dtypes and shardings of `like`. From bfloat16 to float32 is exact, the reverse rounds to the
    nearest even.

  Raises:
    WeightsError: listing every parameter that is not in the files, every tensor that is not in the model, every wrong shape and
      dtype; or naming the file that is missing or damaged. Buffers of rotary frequencies are ignored, as is an lm_head that
      repeats the embedding of a tied model.
  """
  with contextlib.ExitStack() as stack:
    tensors, wanted = _matched(folder, like, stack)
    arrays = [_put(tensors, name, leaf) for name, leaf in wanted]
  return jax.tree.unflatten(jax.tree.structure(like), arrays)


def check(folder: Path | str, like: Any) -> None:
  """Raises WeightsError as `load` would; reads the headers of the files, and of a tied model that has an lm_head the two tables."""
  with contextlib.ExitStack() as stack:
    _matched(folder, like, stack)


def _matched(folder, like, stack) -> tuple[dict[str, Any], list[tuple[huggingface.Name, Any]]]:
  """The open tensors by name, and for each leaf how it is called there."""
  leaves = jax.tree.leaves_with_path(like)
  wanted = [(_name_of(sharding.path_of(keys)), leaf) for keys, leaf in leaves]
  tensors = _open(Path(folder), stack)
  _check(tensors, wanted)
  return tensors, wanted


def save(
  folder: Path | str,
  params: Any,
  arguments: dict[str, Any],
  *,
  dtype: str,
  max_shard_bytes: int,
  carried: dict[str, Any],
  extra_files: Iterable[Path | str] = (),
) -> None:
  """Writes a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads, whole or not at all.

  Args:
    folder: is made; one with something in it is refused.
    params: the tree of `transformer.make(**arguments)`, LoRA merged, without value heads; every device of this process's own.
    arguments: of `transformer.make`.
    dtype: of the files, 'float32' or 'bfloat16' (rounded to the nearest even).
    max_shard_bytes: bytes of tensors in a file; a larger model is several files with an index.
    carried: see `huggingface.config`.
    extra_files: copied beside, for example tokenizer.json and tokenizer_config.json.

  Raises:
    WeightsError: if the folder is in use, or params and arguments do not fit together, by name.
  """
  config = huggingface.config(arguments, dtype, carried)
  leaves = {sharding.path_of(keys): leaf for keys, leaf in jax.tree.leaves_with_path(params)}
  expected = huggingface.names(arguments)
  problems = [f'{path} is missing' for path in expected if path not in leaves]
  problems += [
    f'{path} has no name in a checkpoint (lora.merge adapters, leave out heads)'
    for path in leaves
    if path not in expected
  ]
  for path, (_, shape) in expected.items():
    leaf = leaves.get(path)
    if leaf is not None and leaf.shape != shape:
      problems.append(f'{path} has shape {leaf.shape}, arguments say {shape}')
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      problems.append(f'{path} is spread over processes: gather it first')
  if problems:
    raise WeightsError('cannot save: ' + '; '.join(problems))
  tensors = itertools.chain.from_iterable(
    _theirs(name, leaves[path], np.dtype(jnp.dtype(dtype))) for path, (name, _) in expected.items()
  )
  write(folder, config, tensors, max_shard_bytes=max_shard_bytes, extra_files=extra_files)


def write(
  folder: Path | str,
  config: dict[str, Any],
  tensors: Iterable[tuple[str, np.ndarray]],
  *,
  max_shard_bytes: int,
  texts: dict[str, str] | None = None,
  extra_files: Iterable[Path | str] = (),
) -> None:
  """Writes config.json, named tensors, `texts` (file name -> content) and copies of files, whole or not at all.

  Takes `tensors` one by one and holds at most `max_shard_bytes` of them, or one that is larger.
  """
  folder = Path(folder).absolute()
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise WeightsError(f'{folder} is in use: name a new folder, or remove it')
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder.parent, prefix='.partial-') as aside:
    new = Path(aside) / folder.name
    new.mkdir()
    for name, text in {CONFIG: _json(config), **(texts or {})}.items():
      (new / name).write_text(text, encoding='utf-8')
    for file in map(Path, extra_files):
      shutil.copyfile(file, new / file.name)
    _write_tensors(new, tensors, max_shard_bytes)
    new.rename(folder)


def _write_tensors(folder, tensors, max_shard_bytes):
  """One file, or numbered files with an index. transformers wants the metadata."""
  import safetensors.numpy

  shards, total = [], 0
  for number, shard in enumerate(_shards(tensors, max_shard_bytes)):
    file = folder / f'{number}.partial'
    try:
      safetensors.numpy.save_file(shard, file, {'format': 'pt'})
    except safetensors.SafetensorError as error:
      raise WeightsError(f'{folder.name} cannot be written: {error}') from error
    file.chmod((folder / CONFIG).stat().st_mode)  # safetensors lets only the owner read
    shards.append(list(shard))
    total += sum(tensor.nbytes for tensor in shard.values())
  if len(shards) == 1:
    (folder / '0.partial').rename(folder / FILE)
    return
  places = {}
  for number, names in enumerate(shards):
    file = f'model-{number + 1:05}-of-{len(shards):05}.safetensors'
    (folder / f'{number}.partial').rename(folder / file)
    places |= dict.fromkeys(names, file)
  index = {'metadata': {'total_size': total}, 'weight_map': places}
  (folder / INDEX).write_text(_json(index), encoding='utf-8')


def _shards(tensors, max_shard_bytes) -> Iterator[dict[str, np.ndarray]]:
  """Groups tensors in the order in which they come."""
  shard, size = {}, 0
  for name, tensor in tensors:
    if shard and size + tensor.nbytes > max_shard_bytes:
      yield shard
      shard, size = {}, 0
    shard[name] = np.ascontiguousarray(tensor)
    size += tensor.nbytes
  yield shard


@jax.jit
def _take(leaf, layer):
  return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)


def _theirs(name, leaf, dtype):
  """Their tensors of one parameter, each with its name. Cast on the host: XLA flushes the smallest numbers to 0."""
  if not name.stacked:
    yield name.theirs, name.convert(np.asarray(leaf).astype(dtype))
    return
  for layer in range(leaf.shape[0]):
    block = _take(leaf, layer) if isinstance(leaf, jax.Array) else leaf[layer]
    block = np.asarray(block).astype(dtype)
    if name.stacked == 1:
      yield name.theirs.format(layer=layer), name.convert(block)
    else:
      for expert, part in enumerate(block):
        yield name.theirs.format(layer=layer, expert=expert), name.convert(part)


def _open(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
  """Tensor name -> slice object, over all files of a folder. Only headers are read."""
  import safetensors

  index = folder / INDEX
  places = None
  if not (folder / FILE).exists() and index.exists():
    places = _read_json(index).get('weight_map')
    if not isinstance(places, dict):
      raise WeightsError(f'{index} has no weight_map: it is damaged')
  files = {FILE} if places is None else set(places.values())
  missing = sorted(file for file in files if not (folder / file).exists())
  if missing:
    raise WeightsError(f'{folder} lacks {", ".join(missing)}: download it again')
  tensors = {}
  for file in sorted(files):
    try:
      opened = stack.enter_context(safetensors.safe_open(folder / file, 'np'))
    except (safetensors.SafetensorError, OSError) as error:
      raise WeightsError(f'{folder / file} is damaged ({error}): download it again') from error
    tensors |= {name: opened.get_slice(name) for name in opened.keys()}
  lost = sorted(set(places or ()) - set(tensors))
  if lost:
    raise WeightsError(f'{index} names tensors that no file has: {", ".join(lost)}')
  return tensors


def _check(tensors, wanted):
  """Raises WeightsError with everything that does not match."""
  expected = {}
  for name, leaf in wanted:
    shape = name.their_shape(leaf.shape)
    expected |= {their_name: shape for _, their_name in _parts(name, leaf.shape)}
  absent = [name for name in expected if name not in tensors]
  unknown = {
    name for name in tensors if name not in expected and not name.endswith('rotary_emb.inv_freq')
  }
  problems = []
  head, embedding = 'lm_head.weight', 'model.embed_tokens.weight'
  if head in unknown and embedding in tensors:
    unknown.remove(head)
    if not _equal(tensors[head], tensors[embedding]):
      problems.append(
        f'{head} differs from {embedding}, but the model is tied: make it with tied=False'
      )
  if absent:
    problems.append(f'not in the files: {", ".join(sorted(absent))}')
  if unknown:
    problems.append(f'not in the model: {", ".join(sorted(unknown))}')
  for name, shape in expected.items():
    if name in tensors:
      found, dtype = tuple(tensors[name].get_shape()), tensors[name].get_dtype()
      if found != shape:
        problems.append(f'{name} has shape {found}, the model has {shape}')
      if dtype not in READABLE:
        problems.append(f'{name} is {dtype}, can be read from {READABLE}')
  if problems:
    raise WeightsError('; '.join(problems))


def _equal(first, second) -> bool:
  """Whether two tensors in files are the same, a thousand rows at a time."""
  shape, step = first.get_shape(), 1024
  if shape != second.get_shape() or first.get_dtype() != second.get_dtype():
    return False
  cuts = [slice(i, min(i + step, shape[0])) for i in range(0, shape[0], step)]
  return all(np.array_equal(first[cut], second[cut]) for cut in cuts)


def _parts(name, shape) -> Iterator[tuple[tuple[int, ...], str]]:
  """(Position on the stacked axes, name of the tensor) of one parameter."""
  for place in itertools.product(*map(range, shape[: name.stacked])):
    yield place, name.theirs.format(**dict(zip(('layer', 'expert'), place, strict=False)))


def _put(tensors, name, leaf) -> jax.Array:
  """One parameter on its devices. The host holds one device's part at a time; a part that several have is read once."""
  if leaf.sharding is None:
    whole = tuple(slice(0, size) for size in leaf.shape)
    return jax.device_put(_read(tensors, name, leaf, whole))
  parts, arrays = {}, []
  for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
    index = tuple(
      slice(*cut.indices(size)[:2]) for cut, size in zip(index, leaf.shape, strict=True)
    )
    key = tuple((cut.start, cut.stop) for cut in index)
    source = parts[key] if key in parts else _read(tensors, name, leaf, index)
    to = jax.sharding.SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind)
    parts[key] = jax.block_until_ready(jax.device_put(source, to))
    arrays.append(parts[key])
  return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def _read(tensors, name, leaf, index) -> np.ndarray:
  """leaf[index] in the dtype of leaf, tensor by tensor."""
  out = np.empty([cut.stop - cut.start for cut in index], leaf.dtype)
  stack = index[: name.stacked]
  inner = leaf.shape[name.stacked :], index[name.stacked :]
  for place, their_name in _parts(name, leaf.shape):
    if all(cut.start <= i < cut.stop for i, cut in zip(place, stack, strict=True)):
      to = tuple(i - cut.start for i, cut in zip(place, stack, strict=True))
      out[to] = name.cut(tensors[their_name], *inner)
  return out


def _name_of(path: str) -> huggingface.Name:
  for name in huggingface.NAMES:
    if name.path == path:
      return name
  raise WeightsError(
    f'{path} has no name in a checkpoint: load the tree without it, and add it afterwards'
  )


def _json(value) -> str:
  return json.dumps(value, indent=2) + '\n'


def _read_json(path: Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise WeightsError(f'{path} cannot be read: {error}') from error
  if not isinstance(value, dict):
    raise WeightsError(f'{path} holds no object')
  return value

"""Whose a workdir is: the run's, wherever it computes."""

import json
from types import SimpleNamespace

import jax
import pytest

from sao_jax import replay, workdir
from tests.test_build import config

MOVED = {'mesh__fsdp': 4, 'engine__tensor': 2, 'train__micro_rows': 8, 'model__remat': 'dots_saveable'}  # fmt: skip


def test_a_run_goes_on_elsewhere_and_not_as_another(tmp_path):
  folder = tmp_path / 'run'
  workdir.claim(folder, config()).close()
  assert workdir.run_id(config(**MOVED)) == workdir.run_id(config())
  workdir.claim(folder, config(**MOVED)).close()
  saved = json.loads((folder / 'config.json').read_text())
  assert saved['mesh']['fsdp'] == 4 and saved['train']['micro_rows'] == 8
  for name in ('sao__eps_low', 'policy__learning_rate', 'model__rope_theta'):
    changed = config(**{name: 0.125})
    assert workdir.run_id(changed) != workdir.run_id(config())
    with pytest.raises(ValueError, match=rf'{name.replace("__", ".")} is .* there and 0.125 here'):
      workdir.claim(folder, changed)
  assert json.loads((folder / 'config.json').read_text()) == saved
  moves = (folder / workdir.MOVES).read_text()
  assert moves == 'engine.tensor is 1 there and 2 here\n'
  with pytest.raises(ValueError, match=r'went on in another way \(engine.tensor is 1 there'):
    replay.check(SimpleNamespace(config=config()), folder)


def test_what_compressed_sums_owe_ties_a_run_to_its_data_axis():
  owed = {'train__compression': 'int8'}
  two, four = (workdir.run_id(config(**owed, mesh__data=data)) for data in (2, 4))
  assert two != four and two == workdir.run_id(config(**owed, mesh__data=2, mesh__fsdp=2))
  assert workdir.run_id(config(mesh__data=2)) == workdir.run_id(config(mesh__data=4))


def test_one_device_is_enough_to_score_a_run():
  alone = workdir.on_one_device(config(**MOVED, engine__apart=True))
  assert set(alone.mesh.values()) == {1} and alone.engine.tensor == 1 and not alone.engine.apart
  assert workdir.run_id(alone) == workdir.run_id(config())
  many = config(**{**MOVED, 'mesh__fsdp': 4096}, model__attention='cudnn')
  assert workdir.to_score(many).mesh.fsdp == 1 and workdir.to_score(many).model.attention == 'xla'
  here = workdir.to_score(config(mesh__fsdp=jax.device_count(), model__attention='cudnn'))
  assert here.mesh.fsdp == jax.device_count() and here.model.attention == 'xla'


def test_a_warm_start_serves_other_back_ends_and_no_other_model(tmp_path):
  folder = tmp_path / 'warm'
  workdir.claim(folder, config()).close()
  here = {'supervised__workdir': str(folder)}
  with pytest.raises(ValueError, match='is not complete'):
    workdir.check_warm_start(tmp_path / 'new', config(**here))
  (folder / 'checkpoints' / 'supervised' / f'{config().supervised.num_steps:08d}').mkdir(
    parents=True
  )
  (next((folder / 'checkpoints' / 'supervised').iterdir()) / 'COMPLETE').write_text('')
  workdir.check_warm_start(tmp_path / 'new', config(**here, model__attention='chunked'))
  with pytest.raises(ValueError, match='another model'):
    workdir.check_warm_start(tmp_path / 'new', config(**here, model__width=16))

"""Whose a workdir is: the run's, wherever it computes."""

import json

import pytest

from sao_jax import workdir
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


def test_one_device_is_enough_to_score_a_run():
  alone = workdir.on_one_device(config(**MOVED, engine__apart=True))
  assert set(alone.mesh.values()) == {1} and alone.engine.tensor == 1 and not alone.engine.apart
  assert workdir.run_id(alone) == workdir.run_id(config())


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

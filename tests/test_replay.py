"""Record and replay: a real asynchronous run, with threads and real tools, does the same again, or says where not."""

import asyncio
import json
import shutil
import types

import pytest

from sao_jax import loop, pretraining
from sao_jax import replay as replaying
from sao_jax.runtime import replay as record
from sao_jax.runtime.watchdog import Waits
from tests import tiny

UPDATES = 50


def parts_of(**changes):
  # 16 in flight on 8 slots: slots are taken from episodes that are with their tools.
  return tiny.parts_of(
    **{
      'runtime__mode': 'async',
      'runtime__pipeline_depth': 3,
      'train__num_steps': UPDATES,
      'train__save_every': 20,
      'evaluation__every': 20,
      'sandbox__latency_s': 0.005,
      **changes,
    }
  )


@pytest.fixture(scope='module')
def recorded(world, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'recorded'
  tiny.run(world, parts_of(), workdir)
  return workdir


def replay(world, workdir, parts=None) -> replaying.Replayed:
  parts = parts or parts_of()

  async def main():
    state = tiny.fresh_state(world, parts)
    return await replaying.repeat(
      parts,
      workdir,
      state,
      world.programs,
      work=pretraining.make_work(parts, Waits(asyncio.get_running_loop().time)),
      show=lambda *_: None,
    )

  return asyncio.run(asyncio.wait_for(main(), 200))


def test_a_real_run_of_50_updates_replays_to_the_same_parameters_three_times(world, recorded):
  lines = tiny.rows(recorded / 'replay.jsonl')
  rounds = [line for line in lines if line['kind'] == 'round']
  # It was asynchronous, weights changed in flight, tools were used, slots changed hands.
  updates = [row for row in tiny.rows(recorded / 'metrics.jsonl') if 'loss/policy' in row]
  assert len(updates) == UPDATES and max(row['async/staleness_max'] for row in updates) >= 2
  assert sum(row['tool/calls_mean'] for row in updates) > 1
  assert len({line['version'] for line in rounds}) > UPDATES / 2
  expected = tiny.digests(recorded)
  assert len(set(expected)) == UPDATES + 1
  before = {path: path.read_bytes() for path in recorded.iterdir() if path.is_file()}
  for _ in range(3):
    done = replay(world, recorded)
    assert done == (UPDATES + 1, len(rounds), expected[-1], True)
  assert {path: path.read_bytes() for path in recorded.iterdir() if path.is_file()} == before


def test_a_run_that_was_stopped_and_resumed_replays(world, tmp_path):
  parts, workdir = parts_of(train__num_steps=12), tmp_path / 'resumed'
  for stop_at in (80, 60):
    with pytest.raises(loop.Stopped):
      tiny.run(world, parts, workdir, stop_at=stop_at)
  tiny.run(world, parts, workdir)
  kinds = [line['kind'] for line in tiny.rows(workdir / 'replay.jsonl')]
  assert kinds.count('restart') == 2
  done = replay(world, workdir, parts)
  assert (done.updates, done.digest, done.complete) == (13, tiny.digests(workdir)[-1], True)


def test_a_killed_run_replays_as_far_as_it_came(world, recorded, tmp_path):
  text = (recorded / 'replay.jsonl').read_text()
  shutil.copytree(recorded, tmp_path / 'killed')
  (tmp_path / 'killed' / 'replay.jsonl').write_text(text[: len(text) // 2])
  done = replay(world, tmp_path / 'killed')
  assert not done.complete
  assert 10 < done.updates == len(tiny.digests_of(text[: len(text) // 2]))


def changed(lines, kind, number, **fields):
  """The `number`-th line of a kind, with other fields; and its place."""
  places = [i for i, line in enumerate(lines) if line['kind'] == kind]
  place = places[number]
  return [*lines[:place], {**lines[place], **fields}, *lines[place + 1 :]], place + 1


@pytest.mark.parametrize(
  ('kind', 'fields', 'words'),
  [
    ('round', {'digest': 1}, 'sampled other tokens or log-probabilities'),
    ('round', {'version': 999}, 'version 999, which there is not'),
    ('finished', {'digest': 1}, 'another trajectory'),
    ('update', {'digest': 'f' * 16}, 'gave .* and not ffff'),
    ('start', {'seed': 7}, 'sampled other tokens|another trajectory|impossible|asked the engine'),
    ('take', {'episodes': ['000999-0-0']}, '000999-0-0 is taken and has not finished'),
  ],
)
def test_what_differs_is_named_with_its_line(world, recorded, tmp_path, kind, fields, words):
  lines, place = changed(tiny.rows(recorded / 'replay.jsonl'), kind, 5, **fields)
  (tmp_path / 'replay.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  with pytest.raises(record.Diverged, match=words) as caught:
    replay(world, tmp_path)
  named = int(str(caught.value).partition('line ')[2].partition(' ')[0])
  assert named == place if kind != 'start' else named > place


def test_a_tool_that_answered_otherwise_shows_in_the_next_round(world, recorded, tmp_path):
  lines = tiny.rows(recorded / 'replay.jsonl')
  turns = [i for i, line in enumerate(lines) if line['kind'] == 'answer' and 'turn' in line]
  episodes = [lines[i]['episode'] for i in turns]
  # The second turn of an episode is what its tool said.
  place = next(i for n, i in enumerate(turns) if lines[i]['episode'] in episodes[:n])
  tokens = lines[place]['turn']
  lines[place] = {**lines[place], 'turn': [*tokens[:-1], tokens[-1] ^ 1]}
  (tmp_path / 'replay.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  with pytest.raises(record.Diverged, match='sampled other tokens'):
    replay(world, tmp_path)


def test_a_run_that_was_not_recorded_is_refused(world, tmp_path):
  with pytest.raises(ValueError, match=r'runtime\.record'):
    replaying.check(types.SimpleNamespace(config=parts_of().config), tmp_path)

"""What the doctor says of small runs whose answers are worked out by hand."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sao_jax.report import doctor

EXPERIMENTS = Path(__file__).parents[1] / 'experiments'
CONFIG = {
  'runtime': {'mode': 'async', 'max_staleness': 4, 'pipeline_depth': 1, 'retries': 2},
  'train': {'batch_size': 8},
}


def event(t, episode, name, reason=None, version=0, **facts):
  prompt = f'p{episode.split("-")[0]}'
  row = {'t': t, 'episode': episode, 'prompt': prompt, 'event': name, 'reason': reason}
  return {**row, 'version': version, **facts}


def played(episode, times=(0.0, 1.0, 9.0), *, version=0, start='pending', reason=None, **facts):
  """The events of an episode that finished: started, running and finished at `times`."""
  return [
    event(times[0], episode, start, reason, version),
    event(times[1], episode, 'running', None, version),
    event(times[2], episode, 'finished', None, version, **facts),
  ]


def folder(path, events, metrics=(), **runtime):
  """Writes a run; events in the order of time."""
  path.mkdir(exist_ok=True)
  config = {**CONFIG, 'runtime': {**CONFIG['runtime'], **runtime}}
  (path / 'config.json').write_text(json.dumps(config))
  write(path / 'events.jsonl', sorted(events, key=lambda row: row['t']))
  write(path / 'metrics.jsonl', metrics)
  return path


def write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def section(workdir, title):
  """The text of one section, on one line."""
  sections = dict(part.split('\n', 1) for part in doctor.diagnose(workdir).split('\n\n'))
  return ' '.join(sections[f'## {title}'].split())


def update(step, time_s, idle, engine=0.5, **metrics):
  return {'step': step, 'time_s': time_s, 'idle/learner': idle, 'idle/engine': engine, **metrics}


# Conservation.


def test_every_end_is_counted_and_open_episodes_are_said(tmp_path):
  events = [
    *played('0-0-0'), event(10, '0-0-0', 'trained', version=1),
    *played('1-0-0'), event(10, '1-0-0', 'dropped', 'group_incomplete'),
    event(0, '2-0-0', 'pending'), event(2, '2-0-0', 'failed', 'infra'),
    event(3, '2-0-1', 'reissued', 'infra'), event(4, '2-0-1', 'running'),
    event(0, '3-0-0', 'pending'), event(5, '3-0-0', 'cancelled', 'stopped'),
    event(0, '4-0-0', 'pending'),
  ]  # fmt: skip
  text = section(folder(tmp_path, events), 'Episodes')
  assert 'BUG' not in text
  assert '6 started = 1 trained + 1 dropped + 1 failed + 1 cancelled + 2 open.' in text
  assert 'Open now: 1 pending, 1 running.' in text


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path):
  folder(tmp_path, [event(0, '0-0-0', 'pending')])
  with (tmp_path / 'events.jsonl').open('a') as file:
    file.write('{"t": 1.0, "episode": "0-0-0", "pro')
  assert '1 started = 0 trained + 0 dropped + 0 failed + 0 cancelled + 1 open.' in section(
    tmp_path, 'Episodes'
  )


@pytest.mark.parametrize(
  ('extra', 'said'),
  [
    # The same id once more from its start: every transition is possible, and yet it trains twice.
    ([*played('0-0-0', (11, 12, 13)), event(14, '0-0-0', 'trained')], '1 episodes were trained on twice'),
    ([event(11, '0-0-0', 'trained')], '0-0-0 trained after nothing is impossible; 1 started, and 2 ended'),
    ([event(11, '1-0-0', 'pending'), event(12, '1-0-0', 'finished')], 'finished after pending'),
    ([event(11, '1-0-0', 'pending'), event(12, '1-0-0', 'pending')], 'pending after pending'),
    ([event(11, '1-0-0', 'failed', 'env')], '1-0-0 failed after nothing'),
  ],
)  # fmt: skip
def test_a_log_that_does_not_add_up_is_a_bug(tmp_path, extra, said):
  events = [*played('0-0-0'), event(10, '0-0-0', 'trained', version=1), *extra]
  text = section(folder(tmp_path, events), 'Episodes')
  assert text.startswith('BUG: ') and said in text


# Waiting.


def test_waiting_for_tools_by_hand(tmp_path):
  # 8 s of running: 5 with tools, 2 with the engine, 1 not told; 1 s pending before. Of 9 s: 56, 22, 11, 11 %.
  events = played('0-0-0', seconds={'engine': 2.0, 'environment': 5.0})
  events += [event(12, '0-0-0', 'trained', version=1)]
  # Updates of 10, 10 and 20 s: the learner waited 1 + 1 + 18 of 40 s, the engine 2 + 2 + 12.
  metrics = [update(1, 10, 0.1, 0.2), {'step': 1, 'eval/pass@1': 0.5}]
  metrics += [update(2, 20, 0.1, 0.2), update(3, 40, 0.9, 0.6)]
  text = section(folder(tmp_path, events, metrics), 'Why the learner waited')
  assert text.startswith(
    'The learner waited 50 % of the time: mostly for episodes that were with their tools. The engine was idle 40 % '
  )
  assert 'Worst stretch: updates 3 to 3, 90 % of the time.' in text
  assert (
    '56 % with their tools, 22 % with the engine, 11 % waiting to start, 11 % elsewhere' in text
  )
  assert 'They ran 8 s (median), 8 s (95 %), 8 s (longest).' in text
  assert 'waited for the learner, its update included: 3 s.' in text
  assert 'Try: more calls at once (sandbox.num_workers)' in text


def test_updates_are_timed_from_the_end_of_value_pretraining(tmp_path):
  # The first update began at 30, so that it lasted 10 s like the second: (9 + 1) / 20.
  events = [*played('0-0-0'), event(30, '0-0-0', 'trained', 'value_pretraining')]
  metrics = [update(1, 40, 0.9), update(2, 50, 0.1)]
  assert 'waited 50 %' in section(folder(tmp_path, events, metrics), 'Why the learner waited')


def test_back_off_after_a_failure_is_no_queue_and_a_restart_is_no_back_off(tmp_path):
  events = [
    event(0, '0-0-0', 'pending'), event(0, '0-0-0', 'failed', 'env'),
    *played('0-0-1', (0, 6, 7), start='reissued', reason='env'),
    *played('1-0-1', (0, 2, 3), start='reissued', reason='restart'),
  ]  # fmt: skip
  # 6 s of back-off, 2 s pending, 2 s of running without a record. With a record the time before the run is not new:
  # of the 2 s pending one was the breaker's, so that of 10 s 7 are held back, 1 pending, 2 with the engine.
  text = section(folder(tmp_path, events, [update(1, 10, 0.5)]), 'Why the learner waited')
  assert 'mostly for episodes that were held back after a failure' in text
  assert '60 % held back' in text and '20 % waiting to start' in text
  assert '20 % running (what they spent it on is not recorded)' in text
  events[4]['seconds'] = {'its back-off': 6.0, 'engine': 1.0}
  events[7]['seconds'] = {'breaker of environment math': 1.0, 'engine': 1.0}
  text = section(folder(tmp_path, events, [update(1, 10, 0.5)]), 'Why the learner waited')
  assert '70 % held back' in text and '10 % waiting to start' in text
  assert '20 % with the engine' in text


def test_a_learner_that_hardly_waits_and_a_slow_engine_are_told_apart(tmp_path):
  events = played('0-0-0', seconds={'engine': 8.0})
  text = section(folder(tmp_path, events, [update(1, 10, 0.04, 0.9)]), 'Why the learner waited')
  assert 'waited 4.0 % of the time: it is the bottleneck' in text and 'the learner is the' in text
  text = section(folder(tmp_path, events, [update(1, 10, 0.8, 0.1)]), 'Why the learner waited')
  assert 'the engine is the busier side' in text and 'Try: more episodes that decode' in text
  text = section(folder(tmp_path, events, [update(1, 10, 0.8, 0.9)]), 'Why the learner waited')
  assert 'neither side' in text and 'runtime.pipeline_depth' in text


def test_the_slowest_of_a_synchronous_batch_by_hand(tmp_path):
  # Batch 1 ran 1 and 3 s: 3 / 2. Batch 2 ran 2 and 2 s: 1. Mean 1.25. One more is not used.
  events = []
  for index, (took, batch) in enumerate([(1, 1), (2, 2), (3, 1), (2, 2), (50, None)]):
    events += played(f'{index}-0-0', (0, 0, took))
    events += [event(60 + batch, f'{index}-0-0', 'trained', version=batch)] if batch else []
  text = section(
    folder(tmp_path, events, [update(1, 61, 0.5)], mode='sync'), 'Why the learner waited'
  )
  assert 'slowest episode of a batch ran 1.25 times' in text and "runtime.mode='async'" in text


# Losses.


def test_losses_by_reason_with_times_prompts_and_retries(tmp_path):
  events = []
  for number in range(3):  # one prompt fails three times and is issued again twice
    start, reason = ('reissued', 'env') if number else ('pending', None)
    events += [event(10 * number, f'7-0-{number}', start, reason)]
    events += [event(10 * number + 5, f'7-0-{number}', 'failed', f'env: broke {number}')]
  events += [*played('1-0-0'), event(9, '1-0-0', 'dropped', 'group_incomplete')]
  events += [
    event(0, '2-0-0', 'pending'),
    event(6, '2-0-0', 'failed', 'data', message='no answer', quarantine=True),
  ]
  workdir = folder(tmp_path, events, retries={'infra': 1, 'env': 2})
  text = section(workdir, 'What was lost')
  assert text.startswith('5 of 5 episodes (100 %) failed or were dropped, most for env (3).')
  assert 'failed env 3 from 5.0 to 25.0 s; most: p7 (3); last: broke 2' in text
  assert 'reissued env 2 from 10.0 to 20.0 s; most: p7 (2)' in text
  assert 'dropped group_incomplete 1 from 9.0 to 9.0 s; most: p1 (1)' in text
  assert 'failed data 1 from 6.0 to 6.0 s; most: p2 (1); last: no answer' in text
  assert 'Failures tried again: 2 of 4 (runtime.retries: infra 1, env 2); 1 put their' in text
  assert 'Try: sandbox.timeout_s' in text


def test_restarts_and_the_lines_that_they_set_aside(tmp_path):
  def resume(t, number):
    cancelled = event(t, f'0-0-{number}', 'cancelled', 'restart')
    return [cancelled, event(t, f'0-0-{number + 1}', 'reissued', 'restart')]

  events = [event(0, '0-0-0', 'pending'), *resume(5, 0), event(6, '0-0-1', 'running')]
  folder(tmp_path, [*events, *resume(8, 1)])
  # One more resume was itself set aside, after an update that is undone; a kill left half a line in between.
  write(tmp_path / 'events.lost.jsonl', [event(9, '1-0-0', 'trained', version=3)])
  with (tmp_path / 'events.lost.jsonl').open('a') as file:
    file.write('{"t": 9.5, "epi\n' + ''.join(json.dumps(row) + '\n' for row in resume(8, 1)))
  text = section(tmp_path, 'What was lost')
  assert text.startswith('Nothing failed and nothing was dropped.')
  assert 'Restarts that left a trace: 3. Lines that they set aside: 4, among them 1 of' in text


# Bias.


def learned(order, tokens, reward=lambda n: n % 2, batch_size=8):
  """Episodes that start in the order 0, 1, ... and are used in `order`, in batches."""
  events = []
  for index in range(len(tokens)):
    times = (index, index, 100 + index)
    events += played(f'{index}-0-0', times, tokens=tokens[index], reward=reward(tokens[index]))
  for place, index in enumerate(order):
    version = place // batch_size + 1
    events += [event(1000 + place, f'{index}-0-0', 'trained', version=version)]
  return events


def test_long_episodes_used_later_by_hand(tmp_path):
  # 40 start, short and long in turn; all short ones are used first. Short 2k is used as k: -k, mean -9.5. Long 2k + 1
  # is used as 20 + k: 19 - k, mean 9.5. Apart 19; the variance of 0 .. 19 is 35, so the error is sqrt(2 * 35 / 20) = 1.87.
  tokens = [10, 90] * 20
  order = [*range(0, 40, 2), *range(1, 40, 2)]
  events = learned(order, tokens, reward=lambda n: float(n == 10))
  text = section(folder(tmp_path, events), 'Length bias')
  assert text.startswith('Lengths are biased: long episodes are used later than short ones.')
  assert 'Try: a runtime.pipeline_depth' in text
  by_completion = section(folder(tmp_path, events, consume='completion'), 'Length bias')
  assert "Try: runtime.consume='oldest_started'; a runtime" in by_completion
  assert 'used later than the shortest: +19 (standard error 1.9)' in text
  # In batches of 20 the same 19 places are less than a batch: clear, and no matter.
  large = folder(tmp_path, events)
  config = json.loads((large / 'config.json').read_text())
  (large / 'config.json').write_text(json.dumps({**config, 'train': {'batch_size': 20}}))
  assert section(large, 'Length bias').startswith('No bias of lengths is seen')
  assert 'Correlation of length and reward: -1.00' in text
  # The first two batches hold 16 short ones, the other 24 are 4 short and 20 long: 10 - 76.7.
  assert 'first 2 batches minus the rest (learning changes it too): -66.7' in text


def test_use_in_the_order_of_starting_has_no_bias(tmp_path):
  text = section(folder(tmp_path, learned(range(40), [10, 90] * 20)), 'Length bias')
  assert text.startswith('No bias of lengths') and 'the shortest: +0 (standard error 0)' in text


def test_start_up_is_as_deep_as_the_pipeline(tmp_path):
  # At depth 1 two batches start together: (10 + 30) / 2 - 50.
  events = learned(range(40), [10] * 8 + [30] * 8 + [50] * 24)
  text = section(folder(tmp_path, events), 'Length bias')
  assert 'first 2 batches minus the rest (learning changes it too): -30 (' in text


def test_lengths_that_never_train_by_hand(tmp_path):
  # Trained 10 and 20, unused 30 and 40, 16 each: 15 - 35. Variance 25 * 16 / 15 each: sqrt(2 * 26.67 / 16) = 1.83.
  events = learned(range(16), [10, 20] * 8 + [30, 40] * 8, reward=lambda n: 0.5)
  text = section(folder(tmp_path, events), 'Length bias')
  assert 'biased: trained and unused episodes differ in length' in text
  assert 'Mean length: 15 of trained, 25 of all finished episodes' in text
  assert 'unused: -20 (standard error 1.8)' in text
  assert 'Mean reward: 0.5 of trained, 0.5 of all' in text and 'one of the two is constant' in text


def test_episodes_that_fail_for_being_long(tmp_path):
  events = learned(range(40), [10, 90] * 20)  # of 100 s each
  for index in range(50, 60):
    events += [event(0, f'{index}-0-0', 'pending'), event(1, f'{index}-0-0', 'running')]
    events += [event(151 + index % 2, f'{index}-0-0', 'failed', 'infra')]
  text = section(folder(tmp_path, events), 'Length bias')
  assert 'biased: episodes that fail run longer' in text
  assert (
    'Of 50 started episodes 10 have no known length' in text and 'finished: +50.5 (stand' in text
  )


def test_what_cannot_be_told_is_said(tmp_path):
  assert 'no episode has finished' in section(
    folder(tmp_path, [event(0, '0-0-0', 'pending')]), 'Length bias'
  )
  text = section(folder(tmp_path, learned(range(4), [1, 2, 3, 4])), 'Length bias')
  assert text.startswith('Too few episodes were trained on') and 'first 2 batches' in text
  assert text.count('too few, or too much alike, to tell') == 5


def test_an_older_log_without_lengths_is_judged_by_its_metrics(tmp_path):
  events = [*played('0-0-0'), event(10, '0-0-0', 'trained', version=1)]
  # Trained minus finished: -1 and -3 in turn, mean -2, deviation sqrt(8 / 7), error 1.069 / sqrt 8 = 0.38.
  metrics = [
    update(n, 10 * n, 0.5, **{'length/trained': 9 - 2 * (n % 2), 'length/dispatched': 10})
    for n in range(1, 9)
  ]
  workdir = folder(tmp_path, events, metrics)
  text = section(workdir, 'Length bias')
  assert 'an older log, without lengths' in text
  assert 'length/dispatched, mean over 8 updates: -2 (standard error 0.38)' in text
  assert 'reward/dispatched_mean, mean over 0 updates: too few' in text
  assert '89 % running (what they spent it on is not recorded)' in section(
    workdir, 'Why the learner waited'
  )


# Staleness.


def aged(step, tokens, mean, oldest, hist, masked=0.0, low=0.0, high=0.0):
  return update(step, 10 * step, 0.2) | {
    'tokens/trained': tokens, 'async/staleness_mean': mean, 'async/staleness_max': oldest,
    'async/staleness_hist': hist, 'async/masked_stale': masked, 'dis/dropped_low': low, 'dis/dropped_high': high,
  }  # fmt: skip


def test_staleness_by_hand(tmp_path):
  # 100 tokens of age 0 and 300 of which 100 have age 1, 200 age 5: mean 1100 / 400, masked 200 / 400.
  metrics = [aged(1, 100, 0.0, 0, [100]), aged(2, 300, 11 / 3, 5, [0, 100, 0, 0, 0, 200], 2 / 3)]
  events = [
    *played('0-0-0'), event(10, '0-0-0', 'trained', version=1),  # of version 0, used at 0
    *played('1-0-0'), event(20, '1-0-0', 'trained', version=6),  # used at 5
    *played('2-0-0'), event(20, '2-0-0', 'trained', 'value_pretraining'),  # by no update
  ]  # fmt: skip
  text = section(folder(tmp_path, events, metrics), 'Staleness')
  assert text.startswith('Weights were stale: 50 % of the tokens were too old to train on.')
  assert '2.75 versions old on average, 5 at most; 50 % were masked' in text
  assert (
    'max_staleness=4' in text and 'Tokens by age in versions: 0: 25 %, 1: 25 %, 5: 50 %.' in text
  )
  assert 'to its use: 2.50 on average' in text and '5 at most' in text
  assert 'too few updates' in text and 'Try: a lower runtime.pipeline_depth, or a higher' in text


def test_a_dropped_share_that_grows_is_a_warning(tmp_path):
  metrics = [aged(n, 100, 2.0, 3, [], low=0.002 * n, high=0.002 * n) for n in range(1, 9)]
  # Quarters: (0.004 + 0.008) / 2 and (0.028 + 0.032) / 2; the mean of 1 .. 8 is 4.5.
  text = section(folder(tmp_path, [], metrics), 'Staleness')
  assert text.startswith('Weights were stale: the share outside grew.')
  assert 'Trend of the share outside, first to last quarter of updates: 0.006 to 0.03.' in text
  assert 'Outside the trust interval: 1.8 % of action tokens (0.9 % below, 0.9 % above)' in text


def test_fresh_tokens_outside_the_interval_are_no_staleness(tmp_path):
  text = section(folder(tmp_path, [], [aged(1, 10, 0.0, 0, [10], high=0.2)]), 'Staleness')
  assert 'mismatch/k3' in text
  text = section(folder(tmp_path, [], [aged(1, 10, 1.0, 1, [0, 10])]), 'Staleness')
  assert text.startswith('Weights were fresh enough: 1.00 versions old, bound 4.')


# Folders.


def test_a_run_without_events_yet_and_damaged_files(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))
  assert 'No episode has started' in doctor.diagnose(tmp_path)
  (tmp_path / 'events.jsonl').write_text('{"t": 1}\n')
  with pytest.raises(ValueError, match='line 1 is no event'):
    doctor.diagnose(tmp_path)
  (tmp_path / 'events.jsonl').write_text('')
  assert '0 started' in doctor.diagnose(tmp_path)  # no metrics.jsonl, no events
  (tmp_path / 'config.json').write_text('{"runtime": {"mode": "async"}}')
  with pytest.raises(ValueError, match=r'no runtime\.max_staleness'):
    doctor.diagnose(tmp_path)


def test_the_command(tmp_path, monkeypatch, capsys):
  monkeypatch.syspath_prepend(str(EXPERIMENTS))
  command = importlib.import_module('doctor')
  monkeypatch.delitem(sys.modules, 'doctor')
  command.main(['doctor', f'--workdir={folder(tmp_path / "w", played("0-0-0"))}'])
  assert '## Episodes' in capsys.readouterr().out
  done = subprocess.run(
    [sys.executable, str(EXPERIMENTS / 'doctor.py'), str(tmp_path)],
    cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
  )  # fmt: skip
  assert done.returncode == 2 and 'holds no run' in done.stderr and not done.stdout

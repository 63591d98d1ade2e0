"""What several files use: the tiny world, whose programs take long to compile, is made once a process."""

import collections

import pytest

# Files that take minutes each, longest first: one that begins last leaves the other process without work.
LONG = (
  'test_run',
  'test_deterministic',
  'test_run_exact',
  'test_mesh_run',
  'test_invariance',
  'test_crew',
  'test_notebooks',
)


def pytest_collection_modifyitems(items):
  rank = {name: index for index, name in enumerate(LONG)}
  items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


def pytest_terminal_summary(terminalreporter):
  """Prints how many cells of the fault matrix (test_faults.py) held, by outcome."""
  told = [dict(report.user_properties) for report in terminalreporter.getreports('passed')]
  cells = collections.Counter(properties['cell'] for properties in told if 'cell' in properties)
  if cells:
    outcomes = ', '.join(f'{name} {count}' for name, count in sorted(cells.items()))
    terminalreporter.write_line(f'fault matrix: {cells.total()} cells held ({outcomes})')


@pytest.fixture(scope='session')
def world():
  from tests import tiny

  world = tiny.make()
  yield world
  world.close()

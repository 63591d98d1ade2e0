"""Imports go strictly down the floors; side effects stay where design says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'sao_jax'
FLOORS = {
  'types': 0,
  'losses': 1,
  'advantages': 1,
  'critics': 1,
  'preferences': 1,
  'diagnostics': 1,
  'batching': 1,
  'tokens': 1,
  'chats': 1,
  'sharding': 1,
  'compression': 1,
  'sandbox': 1,
  'models': 2,
  'learner': 2,
  'engines': 2,
  'envs': 2,
  'rollout': 3,
  'runtime': 3,
  'checkpoint': 3,
  'evaluate': 3,
  'report': 3,
  'loop': 4,
  'build': 5,
  'workdir': 6,
  'warm_start': 7,
  'scoring': 7,
  'pretraining': 7,
  'phases': 8,
  'replay': 9,
  'follow': 9,
}
# Pairs on one floor, of which the first may use the second: numerics built on numerics, never back.
SIDEWAYS = {
  ('losses', 'diagnostics'),
  ('preferences', 'losses'),
  ('preferences', 'diagnostics'),
  ('advantages', 'diagnostics'),
  ('critics', 'losses'),
  ('critics', 'diagnostics'),
  ('learner', 'models'),
  ('chats', 'tokens'),
  ('runtime', 'report'),
  ('evaluate', 'runtime'),
  ('checkpoint', 'runtime'),
}
EFFECTS = {
  'os', 'time', 'threading', 'asyncio', 'random', 'subprocess', 'logging', 'absl', 'ml_collections', 'orbax',
}  # fmt: skip
MAY_HAVE_EFFECTS = {'sandbox', 'engines', 'envs', 'runtime', 'checkpoint', 'evaluate', 'report'}
FILES = sorted(path for path in PACKAGE.rglob('*.py') if path != PACKAGE / '__init__.py')


def home(path: Path) -> str:
  return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


def imports(path: Path) -> set[str]:
  """Dotted names of all modules that a file imports, wherever the import stands."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative imports hide the floor'
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return names


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
  here = home(path)
  for name in imports(path):
    if name.startswith('sao_jax.'):
      there = name.split('.')[1]
      allowed = there == here or FLOORS[there] < FLOORS[here] or (here, there) in SIDEWAYS
      assert allowed, f'{here} (floor {FLOORS[here]}) imports {there} (floor {FLOORS[there]})'


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_pure_floors_have_no_side_effects(path):
  if FLOORS[home(path)] <= 3 and home(path) not in MAY_HAVE_EFFECTS:
    used = {name.split('.')[0] for name in imports(path)} & EFFECTS
    assert not used, f'{path} imports {used}'


def test_every_module_has_a_floor():
  assert {home(path) for path in FILES} == set(FLOORS)


def test_only_build_reads_configs():
  readers = {home(path) for path in FILES if 'ml_collections' in path.read_text()}
  assert readers <= {'build', 'workdir'}


def test_the_library_door_opens_without_the_house():
  """A trainer that imports our losses must not pull in an engine, an environment or Orbax."""
  import subprocess
  import sys

  code = (
    'import sys, sao_jax; sao_jax.losses.sao_policy_loss; '
    'bad = [m for m in sys.modules if m.startswith(("orbax", "sao_jax.engines", "sao_jax.envs", "tensorflow"))]; '
    'assert not bad, bad'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)

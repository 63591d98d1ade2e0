"""What several files use: the tiny world, whose programs take long to compile, is made once a process."""

import pytest


@pytest.fixture(scope='session')
def world():
  from tests import tiny

  world = tiny.make()
  yield world
  world.close()

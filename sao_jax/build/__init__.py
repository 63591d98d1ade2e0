"""Config to objects: the only reader of configs. Everything is checked here, before any long work starts."""

from sao_jax.build.assemble import Parts, parts
from sao_jax.build.checks import check_prompts
from sao_jax.build.methods import demonstrate
from sao_jax.build.services import Services, make_sandbox, play_on, programs_of

__all__ = [
  'Parts',
  'Services',
  'check_prompts',
  'demonstrate',
  'make_sandbox',
  'parts',
  'play_on',
  'programs_of',
]

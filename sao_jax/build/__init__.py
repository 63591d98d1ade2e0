"""Config to objects: the only reader of configs. Everything is checked here, before any long work starts."""

from sao_jax.build.assemble import Parts, parts
from sao_jax.build.checks import check_prompts
from sao_jax.build.services import Services

__all__ = ['Parts', 'Services', 'check_prompts', 'parts']

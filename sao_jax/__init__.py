"""Single-rollout Asynchronous Optimization (SAO) in JAX: the library door.

`import sao_jax` gives the numeric library, pure functions of arrays, and nothing else: no engine, environment or
checkpoint code is imported.
"""

from sao_jax import advantages, critics, diagnostics, losses, preferences

__all__ = ['advantages', 'critics', 'diagnostics', 'losses', 'preferences']

"""When a new episode may start. Pure arithmetic on counts."""


def capacity(*, mode: str, batch_size: int, pipeline_depth: int, max_staleness: int) -> int:
  """Episodes that may be in the system at once, those under training included.

  An episode that starts when n others are ahead of it is used about n / batch_size versions later. So the
  depth sets the usual lag, and no more than `max_staleness` batches may be ahead of anything that starts. In
  'sync' mode one batch is the limit: nothing starts before the whole batch has been trained on and its
  weights are published, which is the barrier of a synchronous trainer.
  """
  if mode == 'sync':
    return batch_size
  return batch_size * (min(pipeline_depth, max_staleness) + 1)

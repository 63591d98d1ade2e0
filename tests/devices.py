"""Eight virtual devices, which a process can only have from its start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def on_eight(code: str, *arguments: str) -> Any:
  """What a program prints last, from JSON. XLA compiles without its expensive passes."""
  flags = '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
  done = subprocess.run(
    [sys.executable, '-c', code, *arguments],
    cwd=Path(__file__).parents[1],
    env={**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=800,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])

"""What a run needs of a screen."""

from typing import Any, Protocol


class Screen(Protocol):
  """Where a run tells how it goes; `report.panel.Panel` is one."""

  def update(self, phase: str, step: int, total: int, metrics: dict[str, Any]) -> None: ...

  def score(self, metrics: dict[str, Any]) -> None: ...

  def note(self, text: str) -> None: ...

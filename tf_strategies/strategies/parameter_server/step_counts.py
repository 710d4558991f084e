"""How many steps were begun, now and when each checkpoint was written."""

from __future__ import annotations

from tf_strategies.checkpoint import checkpointer


class StepCounts:
  """Counts steps of training, and what a restored checkpoint costs of them."""

  def __init__(self):
    self.begun = 0  # In this process.
    # In earlier runs, of which this one restored a checkpoint.
    self.before = 0
    self._begun_at_save = 0
    # When a checkpoint of this path was written, or restored.
    self._begun_at: dict[str, int] = {}
    self._epoch_began = 0

  @property
  def since_save(self) -> int:
    """Returns how many were begun since a checkpoint was written, or restored."""
    return self.begun - self._begun_at_save

  @property
  def of_epoch(self) -> int:
    """Returns how many of this epoch were begun, also by an earlier run."""
    return self.begun - self._epoch_began

  @property
  def of_all_runs(self) -> int:
    """Returns how many were begun in this run and those before it."""
    return self.before + self.begun

  def begin_epoch(self, begun_before: int) -> None:
    """Notes that an epoch begins, of which an earlier run has begun so many."""
    self._epoch_began = self.begun - begun_before

  def note_saved(self, path: str) -> None:
    """Notes that steps which begin now start from the values of a checkpoint."""
    self._begun_at_save = self._begun_at[path] = self.begun

  note_restored = note_saved

  def begun_since(self, found: checkpointer.Checkpoint) -> int:
    """Returns how many were begun since a checkpoint was written or restored."""
    of_this_run = found.metadata['steps'] - self.before
    return self.begun - self._begun_at.get(found.path, of_this_run)

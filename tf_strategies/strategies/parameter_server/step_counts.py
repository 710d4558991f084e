"""Counts the steps of a run, and those that a restored checkpoint lacks."""

from __future__ import annotations

from tf_strategies.checkpoint import checkpointer


class StepCounts:
  """Counts the steps of training that this process has begun."""

  def __init__(self):
    self.begun = 0  # In this process.
    # In earlier runs, of which this one restored a checkpoint.
    self.before = 0
    self._begun_at_save = 0
    # By path of a checkpoint: steps begun when it was restored last.
    self._begun_at_restore: dict[str, int] = {}
    self._epoch_began = 0

  @property
  def since_save(self) -> int:
    """Returns the number of steps begun since the last save or restore."""
    return self.begun - self._begun_at_save

  @property
  def of_epoch(self) -> int:
    """Returns the number of steps begun in this epoch, also by an earlier run."""
    return self.begun - self._epoch_began

  @property
  def of_all_runs(self) -> int:
    """Returns the number of steps begun in this run and those before it."""
    return self.before + self.begun

  def begin_epoch(self, begun_before: int) -> None:
    """Notes that an epoch begins, of which an earlier run began some steps."""
    self._epoch_began = self.begun - begun_before

  def note_saved(self) -> None:
    """Notes that a checkpoint was written."""
    self._begun_at_save = self.begun

  def note_restored(self, found: checkpointer.Checkpoint) -> None:
    """Notes that all variables were restored, so that the next steps follow."""
    self._begun_at_save = self._begun_at_restore[found.path] = self.begun

  def begun_since(self, found: checkpointer.Checkpoint) -> int:
    """Returns the number of steps begun since a checkpoint was written or restored."""
    at_save = found.metadata['steps'] - self.before
    return self.begun - self._begun_at_restore.get(found.path, at_save)

"""How many steps were begun and done, now and when each checkpoint was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tf_strategies.checkpoint import checkpointer


class StepCounts:
  """Counts steps of training, and what a restored checkpoint costs of them.

  Steps are begun by whoever trains, in order, and done by workers, which may be some
  steps behind.
  """

  def __init__(self):
    self.begun = 0  # In this process.
    # In earlier runs, of which this one restored a checkpoint.
    self.before = 0
    self._begun_at_save = 0
    # When a checkpoint of this path was written.
    self._begun_at: dict[str, int] = {}
    self._done_at: dict[str, int] = {}
    # By server: how many were done when it was restored last.
    self._done_at_restore: dict[int, int] = {}
    # How many were done, and how often optimizers were called, at the first of them.
    self._first: tuple[int, Mapping[str, int]] | None = None
    self._epoch_began = 0

  @property
  def since_save(self) -> int:
    """Returns how many were begun since a checkpoint was written, or all restored."""
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

  def note_saved(self, path: str, done: int, calls: Mapping[str, int]) -> None:
    """Notes that a checkpoint has all that is begun, of which so many are done.

    `calls`: how often each optimizer was called by then.
    """
    self.note_all_restored(path)
    self._done_at[path] = done
    self._first = self._first or (done, calls)

  def note_all_restored(self, path: str) -> None:
    """Notes that steps which begin now start from the values of a checkpoint."""
    self._begun_at_save = self._begun_at[path] = self.begun

  def note_loaded(
    self, found: checkpointer.Checkpoint, done: int, calls: Mapping[str, int]
  ) -> None:
    """Notes that this run continues the run of a checkpoint; see `note_saved`."""
    self._done_at[found.path] = done
    self._first = done, calls
    self.before = found.metadata['steps']

  def begun_since(self, found: checkpointer.Checkpoint) -> int:
    """Returns how many were begun since a checkpoint was written."""
    return self.begun - self._begun_at.get(found.path, self._of_this_run(found))

  def calls_since(
    self, found: checkpointer.Checkpoint, done: int, name: str, calls: int
  ) -> int:
    """Returns how often an optimizer was called in the steps done since a checkpoint.

    As often in each as in those before it, of this run; once, where there are none.
    `calls`: that the checkpoint has of it.
    """
    at_save = self._done_when_saved(found)
    first_done, first_calls = self._first or (at_save, {})
    steps, since = at_save - first_done, done - at_save
    if steps <= 0 or name not in first_calls:
      return since
    return round(since * (calls - first_calls[name]) / steps)

  def lost_of(
    self, servers: Iterable[int], found: checkpointer.Checkpoint, done: int
  ) -> dict[int, int]:
    """Returns how many done steps are lost on each server that is restored alone.

    Steps that an earlier call returned for a server are not counted again.
    """
    at_save = self._done_when_saved(found)
    at = {s: max(at_save, self._done_at_restore.get(s, 0)) for s in servers}
    self._done_at_restore |= dict.fromkeys(at, done)
    return {server: done - at[server] for server in sorted(at)}

  def _done_when_saved(self, found: checkpointer.Checkpoint) -> int:
    return self._done_at.get(found.path, self._of_this_run(found))

  def _of_this_run(self, found: checkpointer.Checkpoint) -> int:
    return found.metadata['steps'] - self.before

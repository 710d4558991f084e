"""`ElasticOptions`: the options of an elastic job."""

import dataclasses

from tf_strategies import option_checks, process_group


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class ElasticOptions:
  """Number of workers of an elastic job, and what ends it.

  Attributes:
    min_workers: smallest number of workers. Fewer wait until the deadline of
      the rendezvous. By default a majority of the last group continues (in a tie, the
      half with the lowest task), or all workers that are not known to be dead. So
      only one side of a cut network continues. The first group needs a majority of
      the cluster.
    max_workers: largest number of workers; None for all of the cluster.
    window_seconds: how long to wait for more than `min_workers`.
    directory: directory of only this job that all workers can read. A worker that
      starts after the training raises `JobFinishedError`.
    max_failures: number of failures in a row without progress that ends the job.

  Raises:
    UnsupportedOptionError: a value is not allowed.
  """

  min_workers: int | None = None
  max_workers: int | None = None
  window_seconds: float = 5.0
  directory: str | None = None
  max_failures: int = 10

  def __post_init__(self):
    option_checks.check_int('max_failures', self.max_failures, 0)
    if self.directory is not None:
      option_checks.check_local_path(
        'directory', self.directory, "write directory='/shared/job', or None"
      )
    # Raises an error for numbers that no group can have.
    self.of_group(process_group.GroupOptions())

  def of_group(
    self, others: process_group.GroupOptions
  ) -> process_group.GroupOptions:
    """Returns the options of a group: these, and others that are not of a job."""
    least = self.min_workers
    return dataclasses.replace(
      others,
      min_workers=process_group.MAJORITY if least is None else least,
      max_workers=self.max_workers,
      window_seconds=self.window_seconds,
    )

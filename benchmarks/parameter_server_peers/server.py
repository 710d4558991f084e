"""The process of a worker or parameter server: `tf.distribute.Server`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf


class Server:
  """A task of a job. `pool_worker` calls the method.

  Args:
    rank: index of the task in the argument of `serve`.
  """

  def __init__(self, rank: int):
    self._rank = rank
    self._server: tf.distribute.Server | None = None

  def serve(
    self,
    cluster: Mapping[str, Sequence[str]],
    tasks: Sequence[tuple[str, int]],
  ) -> None:
    """Starts the server, which runs until the process ends.

    Args:
      cluster: addresses of the tasks by job.
      tasks: job and index of each task, by rank.
    """
    job, index = tasks[self._rank]
    self._server = tf.distribute.Server(
      tf.train.ClusterSpec(cluster), job_name=job, task_index=index
    )

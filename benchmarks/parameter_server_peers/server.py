"""A worker's or a parameter server's side: `tf.distribute.Server`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf


class Server:
  """A task of a job; `pool_worker` calls the method.

  Args:
    rank: of the task, in the order of `serve`'s tasks.
  """

  def __init__(self, rank: int):
    self._rank = rank
    self._server: tf.distribute.Server | None = None

  def serve(
    self,
    cluster: Mapping[str, Sequence[str]],
    tasks: Sequence[tuple[str, int]],
  ) -> None:
    """Begins to serve, until the process ends.

    Args:
      cluster: addresses by job.
      tasks: job and index of each rank.
    """
    job, index = tasks[self._rank]
    self._server = tf.distribute.Server(
      tf.train.ClusterSpec(cluster), job_name=job, task_index=index
    )

"""TensorFlow's collective runtime between processes.

A process can only be in one cluster, so each peer needs its own processes.
"""

from __future__ import annotations

import tensorflow as tf

from benchmarks.process_peers import ours


class MultiWorkerMirrored(ours.Replicated):
  """`tf.distribute.MultiWorkerMirroredStrategy` with its ring."""

  def make_strategy(self) -> tf.distribute.Strategy:
    """See base class."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
      tf.train.ClusterSpec({'worker': list(self.seat.addresses)}),
      task_type='worker',
      task_id=self.seat.rank,
      rpc_layer='grpc',
    )
    return tf.distribute.MultiWorkerMirroredStrategy(
      resolver,
      tf.distribute.experimental.CommunicationOptions(
        implementation=(
          tf.distribute.experimental.CommunicationImplementation.RING
        )
      ),
    )

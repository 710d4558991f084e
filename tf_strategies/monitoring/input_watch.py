"""Records how long a step waits in `next()` for its batch.

A compiled step requests its batch inside the graph, where Python cannot read a
clock. So the last stage of the pipeline does: before it requests the batch, and
when it has it.

Example:

  >>> import tensorflow as tf
  >>> from tf_strategies.monitoring import input_watch, recorder
  >>> events = []
  >>> recorder.listen(events)
  >>> dataset = input_watch.watch(tf.data.Dataset.range(6).batch(4))
  >>> batches = [batch.numpy().tolist() for batch in dataset]
  >>> recorder.listen(None)
  >>> batches, [event.args['all_rows'] for event in events]
  ([[0, 1, 2, 3], [4, 5]], [4, 2])
"""

import time

import numpy as np
import tensorflow as tf

from tf_strategies.monitoring import recorder

_UNKNOWN = -1


def watch(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """The data set with recording; `dataset` itself if the recorder is off.

  Args:
    dataset: of plain or distributed batches; work ahead of its consumer, such
      as its own `prefetch`, does not count as waiting.
  """
  if not recorder.is_on():
    return dataset
  # The clock is read on the thread that asks, right before it asks on.
  begins = tf.data.Dataset.counter().map(lambda _: tf.timestamp())

  def tell(began, batch):
    noted = tf.numpy_function(
      _note, [began, tf.timestamp(), _all_rows(batch)], tf.int64
    )
    with tf.control_dependencies([noted]):
      return copied(batch)

  watched = tf.data.Dataset.zip((begins, dataset)).map(tell)
  options = tf.data.Options()
  # TensorFlow would add a prefetch after this stage, which would then run ahead
  # of the step and not see it wait.
  options.experimental_optimization.inject_prefetch = False
  return watched.with_options(options)


def copied(structure):
  """Returns a structure with copies of its tensors; None stays None."""
  return tf.nest.map_structure(
    lambda tensor: None if tensor is None else tf.identity(tensor),
    structure,
    expand_composites=True,
  )


def _note(began, ended, all_rows):
  # TensorFlow has only the wall clock: both are read now, to convert.
  now, wall = recorder.now(), time.time()
  times = (now - int((wall - moment) * 1e9) for moment in (began, ended))
  known = None if all_rows == _UNKNOWN else int(all_rows)
  recorder.add('next', recorder.INPUT, *times, all_rows=known)
  return np.int64(0)


def _all_rows(batch):
  """Returns the number of rows of all workers, or -1 if it is unknown."""
  leaves = tf.nest.flatten(batch)
  leaf = next((leaf for leaf in leaves if leaf is not None), None)
  # Batches of several workers carry the rows of all of their replicas.
  all_rows = getattr(leaf, 'all_rows', None)
  if all_rows is not None:
    return tf.cast(tf.reduce_sum(all_rows), tf.int64)
  is_distributed = isinstance(leaf, tf.distribute.DistributedValues)
  values = leaf.values if is_distributed else [leaf]
  if any(not tf.is_tensor(v) or v.shape.rank == 0 for v in values):
    return tf.constant(_UNKNOWN, tf.int64)
  # Ragged and sparse tensors have such a shape too.
  return tf.add_n([tf.shape(v, tf.int64)[0] for v in values])

"""A batch that knows how many rows every replica of the job has.

A worker sees its own rows only, but the weight of its loss depends on all rows.
The input pipeline yields the numbers with the rows, so that a step need not ask
the other workers.
"""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal


class CountedBatch(_tf_internal.PerReplica):
  """One component of a batch, split over this worker's replicas.

  Args:
    values: one tensor a local replica.
    all_rows: int32 [N], rows of every replica of every worker.
  """

  def __init__(self, values, all_rows):
    super().__init__(tuple(values))
    self.all_rows = all_rows

  @property
  def _type_spec(self):
    return CountedBatchSpec(
      [tf.type_spec_from_value(v) for v in self.values],
      tf.type_spec_from_value(self.all_rows),
    )


class CountedBatchSpec(tf.TypeSpec):
  """Type of a `CountedBatch`; TensorFlow's data sets and functions need it."""

  __slots__ = ('_rows_spec', '_value_specs')

  value_type = property(lambda self: CountedBatch)

  def __init__(self, value_specs, rows_spec):
    self._value_specs = tuple(value_specs)
    self._rows_spec = rows_spec

  def _serialize(self):
    return self._value_specs, self._rows_spec

  @property
  def _component_specs(self):
    return (*self._value_specs, self._rows_spec)

  def _to_components(self, value):
    return (*value.values, value.all_rows)

  def _from_components(self, components):
    *values, all_rows = components
    return CountedBatch(values, all_rows)


def regroup(batches, all_rows):
  """Makes counted batches of one structure of tensors a local replica."""
  return tf.nest.map_structure(
    lambda *values: CountedBatch(values, all_rows), *batches
  )


def is_counted(structure) -> bool:
  """Whether `structure` is what an input pipeline of workers yields."""
  leaves = tf.nest.flatten(structure)
  return bool(leaves) and all(isinstance(v, CountedBatch) for v in leaves)

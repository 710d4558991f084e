"""Whether the rows of a batch can be shared out to workers that never meet.

Each worker computes some rows, and results are added up by rows. That is one
device's result if losses are means over rows and metrics are sums over them. Keras's
own steps are so, unless one of these says otherwise while a step is traced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf

from tf_strategies import _keras_internal


class _Share(threading.local):
  """The share that the calling thread traces."""

  fraction: tf.Tensor | None = None  # Of the batch's rows.
  reasons: list[str] | None = None  # Why rows cannot be shared out.


_share = _Share()


@contextlib.contextmanager
def tracing_share(fraction: tf.Tensor) -> Iterator[list[str]]:
  """While a step is traced on a share of a batch, as large a part as `fraction`.

  Yields a list, which gets reasons why the results would not be the whole batch's.
  """
  before = _share.fraction, _share.reasons
  _share.fraction, _share.reasons = fraction, []
  try:
    yield _share.reasons
  finally:
    _share.fraction, _share.reasons = before


def _watch_reduction(reduce):
  @functools.wraps(reduce)
  def reduce_watched(
    values,
    sample_weight=None,
    mask=None,
    reduction='sum_over_batch_size',
    dtype=None,
  ):
    if _share.reasons is not None:
      shape = tf.TensorShape(values.shape)
      if mask is not None:
        _share.reasons.append('a mask that reaches the loss')
      elif reduction not in ('sum_over_batch_size', 'mean'):
        _share.reasons.append(f'a loss with reduction={reduction!r}')
      elif not shape.rank:
        _share.reasons.append('a loss function that returns one number')
      elif not shape[1:].is_fully_defined():
        _share.reasons.append('a loss of rows of different lengths')
    return reduce(values, sample_weight, mask, reduction, dtype)

  return reduce_watched


def _watch_add_loss(add_loss):
  @functools.wraps(add_loss)
  def add_loss_watched(self, loss):
    # Keras adds that of an activity regularizer, a mean over rows, in this way.
    if _share.reasons is not None and self.activity_regularizer is None:
      _share.reasons.append(f'add_loss of layer {self.name!r}')
    return add_loss(self, loss)

  return add_loss_watched


def _count_as_share(update_state):
  """Counts the mean of a share's rows as the part of the batch that it is."""

  @functools.wraps(update_state)
  def update_share(self, values, sample_weight=None):
    is_number = not tf.TensorShape(getattr(values, 'shape', ())).rank
    if _share.reasons is not None and is_number:
      if sample_weight is None:
        sample_weight = tf.cast(_share.fraction, self.dtype)
      elif tf.convert_to_tensor(sample_weight).shape.rank:
        _share.reasons.append(
          f'metric {self.name!r} of one number with sample weights'
        )
    return update_state(self, values, sample_weight)

  return update_share


_WHY = "rows of a batch are shared out where that gives one device's result"
_keras_internal.change(
  _keras_internal.loss_module,
  'reduce_weighted_values(values, sample_weight, mask, reduction, dtype)',
  _watch_reduction,
  _WHY,
)
_keras_internal.change(
  keras.layers.Layer, 'add_loss(loss)', _watch_add_loss, _WHY
)
for _metric in (keras.metrics.Mean, keras.metrics.Sum):
  _keras_internal.change(
    _metric, 'update_state(values, sample_weight)', _count_as_share, _WHY
  )

"""Decides whether workers that never meet can share the rows of a batch.

Each worker computes some rows, and the results are added, weighted by rows.
This gives one device's result if losses are means over rows and metrics are
sums over rows. Keras's own steps meet these conditions, unless one of the
checks here fails while a step is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf

from tf_strategies import _keras_internal


@dataclasses.dataclass
class Share:
  """Observations while a step is traced on a share of a batch."""

  # Reasons why the results would differ from the whole batch's.
  reasons: list[str] = dataclasses.field(default_factory=list)
  # Variables of metrics that receive means over rows, by id.
  means: dict[int, keras.Variable] = dataclasses.field(default_factory=dict)
  _sums: set[int] = dataclasses.field(default_factory=set)

  def note_update(self, metric: keras.metrics.Metric, is_mean: bool) -> None:
    """Records whether a metric adds a mean over rows, or sums over them."""
    ids = {id(v): v for v in metric.variables}
    if is_mean:
      self.means.update(ids)
    else:
      self._sums.update(ids)
    if self._sums & self.means.keys():
      self.reasons.append(
        f'metric {metric.name!r} of rows and of numbers without rows'
      )


class _Current(threading.local):
  share: Share | None = None  # The share that the calling thread traces.


_current = _Current()


@contextlib.contextmanager
def tracing_share() -> Iterator[Share]:
  """Yields the observations while a step is traced on a share of a batch."""
  before, _current.share = _current.share, Share()
  try:
    yield _current.share
  finally:
    _current.share = before


def _watch_reduction(reduce):
  @functools.wraps(reduce)
  def reduce_watched(
    values,
    sample_weight=None,
    mask=None,
    reduction='sum_over_batch_size',
    dtype=None,
  ):
    if _current.share is not None:
      shape = tf.TensorShape(values.shape)
      if mask is not None:
        _current.share.reasons.append('a mask that reaches the loss')
      elif reduction not in ('sum_over_batch_size', 'mean'):
        _current.share.reasons.append(f'a loss with reduction={reduction!r}')
      elif not shape.rank:
        _current.share.reasons.append('a loss function that returns one number')
      elif not shape[1:].is_fully_defined():
        _current.share.reasons.append('a loss of rows of different lengths')
    return reduce(values, sample_weight, mask, reduction, dtype)

  return reduce_watched


def _watch_add_loss(add_loss):
  @functools.wraps(add_loss)
  def add_loss_watched(self, loss):
    # An activity regularizer also uses add_loss. Its loss is a mean over rows,
    # which is allowed.
    if _current.share is not None and self.activity_regularizer is None:
      _current.share.reasons.append(f'add_loss of layer {self.name!r}')
    return add_loss(self, loss)

  return add_loss_watched


def _watch_update(update_state):
  """Records whether a metric gets rows, or their mean."""

  @functools.wraps(update_state)
  def update_watched(self, values, sample_weight=None):
    share = _current.share
    if share is not None:
      is_number = not tf.TensorShape(getattr(values, 'shape', ())).rank
      is_mean = is_number and sample_weight is None
      if (
        is_number
        and not is_mean
        and tf.convert_to_tensor(sample_weight).shape.rank
      ):
        share.reasons.append(
          f'metric {self.name!r} of one number with sample weights'
        )
      share.note_update(self, is_mean)
    return update_state(self, values, sample_weight)

  return update_watched


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
    _metric, 'update_state(values, sample_weight)', _watch_update, _WHY
  )

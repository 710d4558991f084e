"""Reads rows of tables, and makes the updates that can be made row by row."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal
from tf_strategies.keras import optimizer_wrapper


def look_up(
  variable: tf.Variable,
  indices: tf.Tensor,
  read: Callable[[tf.Tensor], tf.Tensor],
  is_once: bool = True,
) -> tf.Tensor:
  """Gathers rows as `tf.gather(variable, indices)`; `read` gets them from elsewhere.

  If `is_once`, a row with several indices is read once. The gradient keeps the indices
  apart as on one device, since most of Keras's optimizers treat two gradients
  differently from their sum.
  """
  indices = tf.convert_to_tensor(indices)
  with _tf_internal.stop_recording():
    if is_once:
      found, places = tf.unique(tf.reshape(indices, [-1]))
      value = tf.gather(read(found), tf.reshape(places, tf.shape(indices)))
      value.set_shape(indices.shape.concatenate(variable.shape[1:]))
    else:
      value = read(indices)
  _tf_internal.record_read(
    variable, value, lambda dy: _gradient_of_rows(variable, dy, indices)
  )
  return value


def _gradient_of_rows(variable, dy, indices):
  return tf.IndexedSlices(
    tf.reshape(dy, [-1, *variable.shape[1:].as_list()]),
    tf.reshape(indices, [-1]),
    tf.constant(variable.shape.as_list(), indices.dtype),
  )


def divide(
  owner: tf.Tensor, count: int, *tensors: tf.Tensor
) -> Iterator[tuple[tf.Tensor, ...]]:
  """Yields those rows of some tensors that each of `count` parts of a table owns."""
  divided = [tf.dynamic_partition(each, owner, count) for each in tensors]
  return zip(*divided, strict=True)


def gather(
  ids: tf.Tensor,
  owner: tf.Tensor,
  reads: Sequence[Callable[[tf.Tensor], tf.Tensor]],
) -> tf.Tensor:
  """Returns the rows of ids [n], each as the part that owns it reads it."""
  divided = divide(owner, len(reads), ids, tf.range(tf.size(ids)))
  mine, places = zip(*divided, strict=True)
  found = [read(each) for read, each in zip(reads, mine, strict=True)]
  return tf.dynamic_stitch(places, found)


def summed(gradient: Any) -> Any:
  """Returns a gradient with equal rows added up. Returns a dense one unchanged."""
  if not isinstance(gradient, tf.IndexedSlices):
    return gradient
  rows, places = tf.unique(gradient.indices)
  values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
  values.set_shape([None, *gradient.values.shape[1:]])
  return tf.IndexedSlices(values, rows, gradient.dense_shape)


def update_lazily(optimizer, gradient, variable, learning_rate) -> None:
  """Applies an optimizer's update to the rows of a gradient, after adding equal
  rows.
  """
  update = type(optimizer).update_step
  if not isinstance(gradient, tf.IndexedSlices):
    update(optimizer, gradient, variable, learning_rate)
    return
  gradient = summed(gradient)
  with _keras_internal.seen_as_rows(
    optimizer, variable, gradient.indices
  ) as rows:
    update(optimizer, gradient.values, rows, learning_rate)


def is_lazy(optimizer) -> bool:
  """Returns whether an optimizer updates only the rows that a gradient has."""
  replaced = vars(optimizer).get('update_step')  # By `LazyRows`.
  return getattr(replaced, 'func', None) is update_lazily


def takes_sums(optimizer, clips: bool = False) -> bool:
  """Returns whether equal rows may be added up before an optimizer gets them.

  Most optimizers of Keras square equal rows one by one. These rows stay apart, as they
  do on one device. `clips` is true if the gradients are still to be clipped.
  """
  chain = list(_keras_internal.chain(optimizer))
  if clips and any(
    optimizer_wrapper.has_any(each, optimizer_wrapper.CLIPPING)
    for each in chain
  ):
    return False
  return isinstance(chain[-1], keras.optimizers.SGD) or is_lazy(chain[-1])


def by_rows(optimizer: Any, update: Callable) -> Callable:
  """Returns Keras's update of a variable, restricted to rows that change.

  Under plain SGD and Adagrad, rows without a gradient do not change. Keras
  skips them under SGD, but computes all rows under Adagrad.
  """
  if type(optimizer) is not keras.optimizers.Adagrad or not (
    # 0 / 0 would not be 0.
    optimizer.epsilon > 0 or optimizer.initial_accumulator_value > 0
  ):
    return update

  def update_rows(variable, gradient, *args):
    # A row with two gradients occurs twice. Adagrad adds both squares to it,
    # reads it for each gradient, and adds both changes. Keras does the same
    # with slices, but first searches for zeros in the divisor. There are no
    # zeros here.
    with _keras_internal.seen_as_rows(
      optimizer, variable, gradient.indices
    ) as seen:
      return update(seen, gradient.values, *args)

  return update_rows


def slot_name(optimizer: keras.optimizers.Optimizer, attribute: str) -> str:
  """Returns the name in files of an optimizer's state of rows."""
  return f'{type(optimizer).__name__}.{attribute.strip("_")}'

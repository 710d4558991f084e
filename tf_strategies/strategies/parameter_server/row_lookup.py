"""Rows of variables, as steps on workers read them."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tf_strategies import _tf_internal


def look_up(
  variable: tf.Variable,
  indices: tf.Tensor,
  read: Callable[[tf.Tensor], tf.Tensor],
  reads_once: bool,
) -> tf.Tensor:
  """As `tf.gather(variable, indices)`, with rows that `read` gets from servers.

  If it `reads_once`, a row that has several indices is sent once. The gradient
  keeps them apart as on one device: most optimizers of Keras do not make the same
  of two gradients and of their sum.
  """
  indices = tf.convert_to_tensor(indices)
  with _tf_internal.stop_recording():
    if reads_once:
      found, places = tf.unique(tf.reshape(indices, [-1]))
      value = tf.gather(read(found), tf.reshape(places, tf.shape(indices)))
      value.set_shape(indices.shape.concatenate(variable.shape[1:]))
    else:
      value = read(indices)
  _tf_internal.record_read(
    variable, value, lambda dy: _gradient(variable, dy, indices)
  )
  return value


def _gradient(variable, dy, indices):
  return tf.IndexedSlices(
    tf.reshape(dy, [-1, *variable.shape[1:].as_list()]),
    tf.reshape(indices, [-1]),
    tf.constant(variable.shape.as_list(), indices.dtype),
  )

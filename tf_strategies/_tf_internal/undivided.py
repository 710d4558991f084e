"""Marks gradients of undivided means in custom loops."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_strategies import _requirements
from tf_strategies._tf_internal.loading import load

_WHY = 'tells a loss that each replica has to divide from one that is divided'
_gradients = load('framework.ops.gradient_registry', _WHY)


class _Tape(threading.local):
  """State of the gradients that the calling thread computes."""

  is_watched = False
  has_undivided = False


_tape = _Tape()
_gradient_of_mean = _gradients.lookup('Mean')


def _note_mean(op, grad):
  """Computes the gradient of a mean, and notes a mean that is the loss or a
  term of it.

  The gradient of the loss is 1. It is still 1 at a term that is not scaled.
  """
  if _tape.is_watched and not _tape.has_undivided and grad.shape.rank == 0:
    is_mean = op.inputs[0].shape.rank != 0
    _tape.has_undivided = is_mean and tf.get_static_value(grad) == 1
  return _gradient_of_mean(op, grad)


_requirements.method(type(_gradients), 'register(candidate, name)', _WHY)
_requirements.attribute(type(_gradients), '_registry', _WHY)
del _gradients._registry['Mean']
_gradients.register(_note_mean, 'Mean')


def _mark(gradient):
  @functools.wraps(gradient)
  def marked(self, *args, **kwargs):
    if not _tape.is_watched:
      return gradient(self, *args, **kwargs)
    before, _tape.has_undivided = _tape.has_undivided, False
    try:
      found = gradient(self, *args, **kwargs)
      if _tape.has_undivided:
        for each in tf.nest.flatten(found):
          if each is not None:
            each._tfs_is_undivided = True
    finally:
      _tape.has_undivided = before
    return found

  return marked


tf.GradientTape.gradient = _mark(tf.GradientTape.gradient)


@contextlib.contextmanager
def undivided_marked() -> Iterator[None]:
  """Makes tapes of this thread mark gradients that contain an undivided mean."""
  before, _tape.is_watched = _tape.is_watched, True
  try:
    yield
  finally:
    _tape.is_watched = before


def is_undivided(gradient: Any) -> bool:
  """Returns whether a tape has marked a gradient."""
  return hasattr(gradient, '_tfs_is_undivided')

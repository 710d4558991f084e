"""`strategy.step(fn)`: computes the step of a training loop as one device would."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, _tf_internal, option_checks


def make(
  strategy: tf.distribute.Strategy,
  fn: Callable[..., Any],
  optimizers: Sequence[Any],
) -> tf.types.experimental.PolymorphicFunction:
  """Returns a `tf.function` that computes `fn` with all replicas of a strategy.

  It passes `fn` on as Keras passes a model's step. Distributed batches are the
  arguments of that step. `fn` captures all other arguments.
  """
  option_checks.check_step(fn, optimizers)
  is_function = isinstance(fn, tf.types.experimental.PolymorphicFunction)
  compiles = is_function and _tf_internal.is_compiled(fn)
  traced = _tf_internal.inlined(fn)

  @functools.wraps(fn.python_function if is_function else fn)
  def step(*args, **kwargs):
    """Runs the step on all replicas, and returns what one device would return."""
    leaves = tf.nest.flatten((args, kwargs))
    are_batches = [_is_batch(strategy, leaf) for leaf in leaves]
    if any(map(_has_rows, leaves)) and not any(are_batches):
      logging.warning(
        'Each replica computes all rows of a step that gets no distributed batch. '
        'Take batches from strategy.experimental_distribute_dataset(dataset) to '
        'share their rows out.'
      )

    def run(batches):
      batches = iter(batches)
      given = [
        next(batches) if is_batch else leaf
        for leaf, is_batch in zip(leaves, are_batches, strict=True)
      ]
      args_, kwargs_ = tf.nest.pack_sequence_as((args, kwargs), given)
      return traced(*args_, **kwargs_)

    run.keras_step = _keras_internal.KerasStep(
      None, 'train', run, compiles, tuple(optimizers)
    )
    return strategy.run(run, (list(itertools.compress(leaves, are_batches)),))

  return tf.function(
    step,
    autograph=False,
    reduce_retracing=True,
    jit_compile=(compiles and strategy.extended.is_one_device) or None,
  )


def _is_batch(strategy, leaf) -> bool:
  if isinstance(leaf, tf.Variable):
    return False
  is_distributed = isinstance(leaf, tf.distribute.DistributedValues)
  # The only replica gets batches as plain tensors.
  return is_distributed or (strategy.extended.is_one_device and _has_rows(leaf))


def _has_rows(leaf) -> bool:
  return tf.is_tensor(leaf) and leaf.shape.rank != 0

"""Every use of Keras's internals, with a reason and a check.

Keras passes functions to a strategy, never the optimizer or the model. The
functions are methods of these objects, or closures over them, so this file
finds the objects there. The checks at the end run during import.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import core, optimizer, trainer
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers import compile_utils
from keras.src.trainers import trainer as base_trainer
from keras.src.utils import traceback_utils

from tf_strategies import _requirements, _tf_internal, errors
from tf_strategies._keras_internal import rows as _rows
from tf_strategies._keras_internal.initial_rows import (  # noqa: F401
  initial_rows,
)
from tf_strategies._keras_internal.rows import (  # noqa: F401  For all others.
  chain,
  replace_update,
  replaced_update,
  row_slots,
  rows_of,
  see_gradients,
  seen_as_part,
  seen_as_rows,
  slots_of,
  table_of,
  update_rows,
)
from tf_strategies._keras_internal.steps import (  # noqa: F401  For all others.
  KINDS,
  KerasStep,
  before_callbacks,
  check_first,
  closure,
  element_spec_of_fit,
  frame_of,
  is_end_of_sequence,
  is_for_model,
  note_call,
  noted_call,
  num_steps,
  optimizers_of,
  refuse_keras_2,
  results_of,
  running_call,
  skip_steps,
  step_of,
  without_optionals,
)

# Epochs: `fit` begins at `model._initial_epoch` if a callback sets it in
# `on_train_begin`. Keras's BackupAndRestore resumes in this way.


def initial_epoch(model: keras.Model) -> int:
  """Returns the epoch in which `fit` begins, if a callback has set it."""
  return model._initial_epoch or 0


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
  """Makes `fit` begin in `epoch`. 0 restores the default."""
  model._initial_epoch = epoch or None


# Optimizers.


def optimizer_of(fn: Callable) -> keras.optimizers.Optimizer | None:
  """Returns the optimizer in the closure of Keras's update function, or None."""
  for content in closure(_tf_internal.unwrap(fn)):
    if isinstance(content, keras.optimizers.Optimizer):
      return content
  return None


def strategy_of(
  optimizer: keras.optimizers.Optimizer,
) -> tf.distribute.Strategy:
  """Returns the strategy under which an optimizer was made."""
  return optimizer._distribution_strategy


def allow_attributes(wrapper: keras.optimizers.Optimizer) -> None:
  """Lets a subclass set attributes before it calls its base's `__init__`.

  Keras tracks attributes unless `_lock` exists. The base class sets options
  that a wrapper passes on to its inner optimizer.
  """
  wrapper._lock = False


def state_of(optimizer: keras.optimizers.Optimizer) -> list:
  """Returns the variables of an optimizer that its updates change."""
  rates = {id(getattr(o, '_learning_rate', None)) for o in chain(optimizer)}
  return [v for v in optimizer.variables if id(v) not in rates]


def trainable_variables(wrapper: keras.optimizers.Optimizer) -> list:
  """Returns the variables that an optimizer was built with, in order."""
  return wrapper._trainable_variables


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list:
  """Returns the moving averages that an optimizer with `use_ema` keeps.

  Also those of an optimizer that it wraps, and those in a `MultiOptimizer`.
  """
  *_, innermost = chain(optimizer)
  found = []
  for each in (innermost, *getattr(innermost, 'optimizers', ())):
    found += getattr(each, '_model_variables_moving_average', None) or ()
  return [average for average in found if average is not None]


def show_averages(wrapper: keras.optimizers.Optimizer) -> None:
  """Lets `SwapEMAWeights` find the moving averages of an inner optimizer.

  Keras looks inside one wrapper only, so a wrapper shows the averages of inner ones.
  """
  *_, innermost = chain(wrapper)
  for each in chain(wrapper):
    for name in ('_model_variables_moving_average', 'optimizers'):
      if each is not innermost and hasattr(innermost, name):
        object.__setattr__(each, name, getattr(innermost, name))


def overwrites_with_gradient(variable: Any) -> bool:
  """Returns whether a variable takes its gradient as its value (float8 scales)."""
  return getattr(variable, 'overwrite_with_gradient', False)


@contextlib.contextmanager
def capture_apply(
  optimizers: Sequence[keras.optimizers.Optimizer],
) -> Iterator[list[tuple[keras.optimizers.Optimizer, list, list | None, int]]]:
  """Makes `apply` add (optimizer, gradients, variables, operations) to a list.

  It is for steps that are traced on a worker while their gradients are applied
  elsewhere. Clipping, accumulation and loss scaling all happen in `apply`, so
  they use the final gradients instead of one worker's. `operations` is how many the
  graph had before the call. Calls in a branch, a loop or a function are done, and have
  no gradients in the list.
  """
  calls = []
  home = tf.compat.v1.get_default_graph()

  def apply(optimizer, grads, trainable_variables=None, **options):
    if options:
      raise errors.UnsupportedOptionError(
        f'the arguments {", ".join(options)}',
        f'{type(optimizer).__name__}.apply(gradients, variables) in a step on workers',
        'keep them in attributes of the optimizer',
      )
    is_nested = tf.compat.v1.get_default_graph() is not home
    variables = trainable_variables and list(trainable_variables)
    found = [] if is_nested else list(grads)
    calls.append((optimizer, found, variables, len(home.get_operations())))
    if is_nested:
      # TensorFlow keeps the graph of a function for the next trace.
      type(optimizer).apply(optimizer, grads, variables)

  for each in optimizers:
    object.__setattr__(each, 'apply', functools.partial(apply, each))
  try:
    yield calls
  finally:
    for each in optimizers:
      object.__delattr__(each, 'apply')


def failed_optimizer(
  error: BaseException | None,
) -> keras.optimizers.Optimizer | None:
  """Returns the optimizer that has raised an error, if it was one."""
  while error is not None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
      found = frame.f_locals.get('self')
      if isinstance(found, base_optimizer.BaseOptimizer):
        return found
    error = error.__context__  # AutoGraph raises errors anew.
  return None


def applying_optimizer() -> keras.optimizers.Optimizer | None:
  """Returns the optimizer for which this thread is working; for errors only."""
  frame = frame_of('_all_reduce_sum_gradients')
  return frame and frame.f_locals['self']


Trainer = trainer.TensorFlowTrainer

# `fit` removes its own frames from tracebacks, and these too.
traceback_utils._EXCLUDED_PATHS = (
  *_requirements.attribute(
    traceback_utils, '_EXCLUDED_PATHS', 'keeps tracebacks of fit short'
  ),
  str(pathlib.Path(__file__).parents[1]) + os.sep,
)


# Variables: Keras identifies their purpose only by their names.


def is_seed_state(name: str | None, dtype: tf.DType | None) -> bool:
  """Returns whether a variable holds the state of a seed generator."""
  return 'seed_generator_state' in (name or '') and dtype == tf.int64


# Factor for a replica's number in the seed that it reads, so that replicas draw
# different numbers. Any odd number works. Layers' seeds are random, so sums do
# not collide.
SEED_STRIDE = 0x9E3779B1


def is_loss_scale(name: str | None) -> bool:
  """Returns whether a variable is the scale of a `LossScaleOptimizer`."""
  return (name or '').endswith('dynamic_scale')


_FOR_ATTRIBUTES = 'get_attr_skipset'


def is_sample() -> bool:
  """Returns whether Keras makes an object only to list its attributes.

  It does so while it saves. In a scope, the variables of such an optimizer would
  wait for workers that are not saving.
  """
  return frame_of(_FOR_ATTRIBUTES) is not None


def is_of_keras(initial_value: Any) -> bool:
  """Returns whether Keras makes a variable from this initial value."""
  return _variable_of(initial_value) is not None


def initial_shape(initial_value: Callable) -> tuple[int, ...] | None:
  """Returns the shape of the variable that Keras is about to make; None otherwise."""
  shape = getattr(_variable_of(initial_value), '_shape', None)
  return None if shape is None else tuple(shape)


def _variable_of(initial_value):
  """Returns the Keras variable in the closure that Keras passes to `tf.Variable`."""
  for content in closure(initial_value):
    if isinstance(content, keras.Variable):
      return content
  return None


def metric_variables(model: keras.Model) -> list[keras.Variable]:
  """Returns the variables of a model's metrics, also before the model has them.

  Keras adds the compiled metrics when it builds them, in the first step.
  """
  compiled = model._compile_metrics
  given = [getattr(compiled, name, None) for name in _COMPILED_METRICS]
  found = [m for m in keras.tree.flatten(given) if isinstance(m, keras.Metric)]
  return [*model.metrics_variables, *(v for m in found for v in m.variables)]


_COMPILED_METRICS = ('_user_metrics', '_user_weighted_metrics')


def masked_outputs(model: keras.Model) -> list:
  """Returns the outputs of a functional model that carry a mask."""
  outputs = keras.tree.flatten(getattr(model, 'outputs', None))
  return [o for o in outputs if getattr(o, '_keras_mask', None) is not None]


def check() -> None:
  """Raises UnsupportedVersionError if Keras lacks anything used above."""
  mention, method = _requirements.mention, _requirements.method
  tf_trainer = _requirements.attribute(
    trainer, 'TensorFlowTrainer', 'trains models under a strategy'
  )
  for kind in KINDS.values():
    why = 'parameter servers run the steps of fit'
    method(tf_trainer, f'make_{kind}_function(force)', why)
    make = getattr(tf_trainer, f'make_{kind}_function')
    mention(make, [f'{kind}_function', f'{kind}_step'], why)
    method(tf_trainer, f'{kind}_step(data)', why)
  mention(tf_trainer.fit, ['train_function'], why)
  mention(
    tf_trainer.make_predict_function, ['self'], 'finds the model of predict'
  )
  why = 'wrappers of optimizers, and loss scales, may be in each other'
  mention(
    keras.callbacks.SwapEMAWeights._apply_to_ema_optimizers,
    ['inner_optimizer', 'optimizers', '_model_variables_moving_average'],
    why,
  )
  mention(
    compile_utils.CompileMetrics.__init__,
    _COMPILED_METRICS,
    'finds metrics that were made outside of a scope',
  )
  why = 'a worker may save alone inside of a scope'
  _requirements.attribute(saving_lib, _FOR_ATTRIBUTES, why)
  why = 'a resumed fit goes on in the epoch that it was interrupted in'
  mention(tf_trainer.fit, ['_initial_epoch'], why)
  epochs = trainer.TFEpochIterator
  mention(epochs.__iter__, ['_enumerate_iterator'], why)
  mention(epochs._enumerate_iterator, ['_steps_seen'], why)
  mention(base_trainer.Trainer.__init__, ['_initial_epoch'], why)
  mention(
    trainer.TFEpochIterator.__init__,
    ['DistributedDataset'],
    'parameter servers feed their workers themselves',
  )
  why = 'finds the optimizer of an update'
  tf_optimizer = optimizer.TFOptimizer
  update = '_distributed_tf_update_step'
  parameters = 'distribution, grads_and_vars, learning_rate'
  method(tf_optimizer, f'{update}({parameters})', why)
  update = getattr(tf_optimizer, update)
  mention(tf_optimizer.__init__, ['_distribution_strategy'], why)
  method(tf_optimizer, '_all_reduce_sum_gradients(grads_and_vars)', why)
  mention(update, ['apply_grad_to_update_var', 'self'], why)
  why = 'LocalSteps and LazyRows wrap an optimizer, parameter servers record it'
  base = base_optimizer.BaseOptimizer
  method(base, 'apply(grads, trainable_variables)', why)
  method(base, 'build(variables)', why)
  method(base, 'scale_loss(loss)', why)
  method(base, 'update_step(gradient, variable, learning_rate)', why)
  method(base, 'finalize_variable_values(var_list)', why)
  mention(base.__init__, ['_lock', '_trainable_variables'], why)
  mention(base.build, ['_trainable_variables'], why)
  why = 'workers that train apart average the moving averages of their weights'
  mention(base.build, ['_model_variables_moving_average'], why)
  mention(
    keras.optimizers.LossScaleOptimizer.build,
    ['dynamic_scale'],
    'central storage writes a loss scale once',
  )
  mention(
    seed_generator.SeedGenerator.__init__,
    ['seed_generator_state'],
    'replicas draw different random numbers',
  )
  mention(
    core.Variable._initialize_with_initializer,
    ['self', '_shape'],
    'places a variable by its size before it is made',
  )
  _rows.check()


check()

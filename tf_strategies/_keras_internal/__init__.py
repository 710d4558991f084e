"""Every use of Keras's internals, with a reason and a check.

Keras passes functions to a strategy, never the optimizer or the model. The
functions are methods of these objects, or closures over them, so this file
finds the objects there. The checks at the end run during import.
"""

import contextlib
import functools
import inspect
import os
import pathlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import name_scope
from keras.src.backend.tensorflow import core, optimizer, trainer
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers import compile_utils
from keras.src.trainers import trainer as base_trainer
from keras.src.trainers.data_adapters import tf_dataset_adapter
from keras.src.utils import traceback_utils

from tf_strategies import _requirements, errors
from tf_strategies._keras_internal.initial_rows import (  # noqa: F401
  initial_rows,
)
from tf_strategies._keras_internal.rows import (  # noqa: F401  For all others.
  RowValues,
  chain,
  in_place_of,
  rows_of,
  see_gradients,
  seen_as_part,
  seen_as_rows,
  slots_of,
  table_of,
)
from tf_strategies._keras_internal.steps import (  # noqa: F401  For all others.
  LENGTH_OF_FIT,
  KerasStep,
  before_callbacks,
  check_first,
  closure,
  element_spec_of_fit,
  frame_of,
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
  return _in_closure(inspect.unwrap(fn), keras.optimizers.Optimizer)


def _in_closure(fn: Callable, kind: type) -> Any:
  """Returns the first object of a kind that a local function refers to, or None."""
  return next((c for c in closure(fn) if isinstance(c, kind)), None)


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

  Keras looks inside one wrapper only, and this one may be in a loss scale.
  """
  inner = wrapper.inner_optimizer
  for name in ('_model_variables_moving_average', 'optimizers'):
    if hasattr(inner, name):
      object.__setattr__(wrapper, name, getattr(inner, name))


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
    """Notes a call, or does one that is not in the graph of the step itself."""
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


def initial_shape(initial_value: Callable) -> tuple[int, ...] | None:
  """Returns the shape of the variable that Keras is about to make; None otherwise."""
  variable = _in_closure(initial_value, keras.Variable)
  return None if variable is None else tuple(variable._shape)


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


# The reason, the owner, and what we use of it: see `_requirements.needs`.
_NEEDED = (
  (
    'parameter servers run the steps of fit',
    Trainer,
    'make_train_function(force): train_function train_step',
    'make_test_function(force): test_function test_step',
    'make_predict_function(force): predict_function predict_step self',
    'train_step(data)',
    'test_step(data)',
    'predict_step(data)',
    'fit: train_function',
  ),
  (
    'strategies feed the steps of fit, and an epoch ends with its data',
    trainer.TFEpochIterator,
    '__init__: self experimental_distribute_dataset _distributed_dataset '
    'DistributedDataset',
    'catch_stop_iteration()',
    '__iter__: _enumerate_iterator',
    '_enumerate_iterator: _steps_seen',
  ),
  (
    'an epoch on several workers ends with their data',
    tf_dataset_adapter.TFDatasetAdapter,
    'num_batches',
  ),
  (
    'all workers train equally long, and a resumed fit goes on in its epoch',
    Trainer,
    *(
      f'{name}: epoch_iterator catch_stop_iteration'
      for name in ('fit', 'evaluate', 'predict')
    ),
    f'fit: validation_data verbose {" ".join(LENGTH_OF_FIT)} _initial_epoch',
  ),
  (
    'a resumed fit goes on in its epoch',
    base_trainer.Trainer,
    '__init__: _initial_epoch',
  ),
  (
    'wrappers of optimizers, and loss scales, may be in each other',
    keras.callbacks.SwapEMAWeights,
    '_apply_to_ema_optimizers: inner_optimizer optimizers '
    '_model_variables_moving_average',
  ),
  (
    'finds metrics that were made outside of a scope',
    compile_utils.CompileMetrics,
    f'__init__: {" ".join(_COMPILED_METRICS)}',
  ),
  ('a worker may save alone inside of a scope', saving_lib, _FOR_ATTRIBUTES),
  (
    'finds the optimizer of an update',
    optimizer.TFOptimizer,
    '_distributed_tf_update_step(distribution, grads_and_vars, learning_rate): '
    'apply_grad_to_update_var self',
    '__init__: _distribution_strategy',
    '_all_reduce_sum_gradients(grads_and_vars)',
  ),
  (
    'strategies wrap an optimizer, record it, or update rows in its place',
    base_optimizer.BaseOptimizer,
    'apply(grads, trainable_variables)',
    'build(variables): _trainable_variables _model_variables_moving_average',
    'scale_loss(loss)',
    'update_step(gradient, variable, learning_rate)',
    'finalize_variable_values(var_list)',
    '_backend_update_step(grads, trainable_variables, learning_rate)',
    '_get_variable_index(variable)',
    '_use_weight_decay(variable)',
    '__init__: _lock _trainable_variables name_scope',
  ),
  (
    'a loss scale is a variable, which central storage writes once',
    keras.optimizers.LossScaleOptimizer,
    'build: dynamic_scale',
    'build(var_list)',
    'scale_loss(loss)',
  ),
  (
    'a part of a gradient has another norm than the whole',
    name_scope.name_scope,
    '__enter__: name_scope_stack caller',
  ),
  (
    'an optimizer updates the rows of a batch',
    optimizer.TFOptimizer,
    '_var_key(variable): _unique_id',
    *(
      f'{name}: value IndexedSlices'
      for name in ('assign', 'assign_add', 'assign_sub')
    ),
  ),
  (
    'servers place variables and read rows; Checkpoint.restore waits for variables',
    core.Variable,
    '_maybe_autocast(value)',
    '_initialize: _value',
    '_initialize_with_initializer: self _shape',
    '_serialize_to_tensors()',
    '_restore_from_tensors(restored_tensors)',
    '_deferred_initialize()',
  ),
  (
    'replicas draw different random numbers',
    seed_generator.SeedGenerator,
    '__init__: seed_generator_state',
  ),
)


def check() -> None:
  """Raises UnsupportedVersionError if Keras lacks anything used above."""
  for why, owner, *members in _NEEDED:
    _requirements.needs(why, owner, *members)


check()

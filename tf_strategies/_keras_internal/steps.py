"""A model's steps, as Keras passes them, and the parts of Keras that we replace."""

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import variables
from keras.src.backend.tensorflow import core, trainer
from keras.src.trainers import trainer as base_trainer
from keras.src.trainers.data_adapters import tf_dataset_adapter

from tf_strategies import _tf_internal, errors

_CALL_CODES = {
  inspect.unwrap(getattr(trainer.TensorFlowTrainer, name)).__code__
  for name in (
    'fit',
    'evaluate',
    'predict',
    'train_on_batch',
    'test_on_batch',
    'predict_on_batch',
  )
}


def _frames() -> Iterator[types.FrameType]:
  """Yields the calls that this thread is in, from inside to outside."""
  frame = sys._getframe(1)
  while frame is not None:
    yield frame
    frame = frame.f_back


def frame_of(function: str) -> types.FrameType | None:
  """Returns this thread's innermost call of a function of that name, if any."""
  return next((f for f in _frames() if f.f_code.co_name == function), None)


def running_call() -> str:
  """Returns the name of the method of a model that this thread runs, or ''.

  If another method calls it, the name is for example 'evaluate in fit'.
  """
  codes = [frame.f_code for frame in _frames()]
  return ' in '.join(code.co_name for code in codes if code in _CALL_CODES)


def note_call() -> None:
  """Notes the method of a model that this thread runs, for `noted_call`."""
  _noted[:] = [running_call()]


def noted_call() -> str:
  """Returns the method that has begun the last step. Any thread may call this.

  It does not look at the frames of other threads: they go on meanwhile, and Python
  may crash.
  """
  return _noted[0]


_noted = ['']


# Steps: Keras calls `strategy.run(model.train_step, ...)` inside a function. It
# stores the function as `model.train_function` and calls it once for each
# batch, or group of batches. Code that replaces this function decides where
# steps run.


@dataclasses.dataclass(frozen=True)
class KerasStep:
  """A step that is written for one device.

  Attributes:
    model: model whose step Keras passed. None for a step of `strategy.step`.
    kind: 'train', 'test' or 'predict'.
    run: the step.
    compiles: whether its user asked for XLA.
    named: optimizers that the user of `strategy.step` named.
  """

  model: keras.Model | None
  kind: str
  run: Callable[[Any], Any]
  compiles: bool = False
  named: tuple[keras.optimizers.Optimizer, ...] = ()


def step_of(fn: Callable) -> KerasStep | None:
  """Returns the Keras step of `fn`, if it is a model's train, test or predict step.

  Raises:
    UnsupportedVersionError: if it is the step of a Keras 2 model.
  """
  fn = inspect.unwrap(fn)  # Of AutoGraph, tf.function and functools.
  step = getattr(fn, 'keras_step', None)
  if step is not None:
    return step
  refuse_keras_2(fn)
  model = getattr(fn, '__self__', None)
  names = 'train_step', 'test_step', 'predict_step'
  if isinstance(model, keras.Model) and fn.__name__ in names:
    return KerasStep(model, fn.__name__.removesuffix('_step'), fn)
  # `predict` passes a local function of Keras's trainer around its step.
  if getattr(fn, '__module__', None) != trainer.__name__:
    return None
  for content in closure(fn):
    found = step_of(content) if callable(content) else None
    if isinstance(content, keras.Model):
      found = KerasStep(content, 'predict', content.predict_step)
    if found:
      return dataclasses.replace(found, kind='predict')
  return None


def refuse_keras_2(fn) -> None:
  """Raises for the step of tf_keras's `fit`, `evaluate`, `predict` and the like.

  Keras 2 divides losses by the number of replicas, regardless of their rows,
  and reduces logs itself. A custom loop calls `run` with another function.
  """
  fn = inspect.unwrap(fn)
  module = (getattr(fn, '__module__', '') or '').partition('.')[0]
  if module == 'tf_keras' and getattr(fn, '__name__', '') == 'run_step':
    raise errors.UnsupportedVersionError(
      'Expected a model of Keras 3, got fit, evaluate or predict of a '
      'tf_keras (Keras 2) model under a strategy of tf_strategies. Fix: '
      'build the model with Keras 3 (import keras), or train the tf_keras '
      'model in a loop of your own that calls strategy.run.'
    )


def results_of(
  model: keras.Model, kind: str
) -> Callable[[], dict[str, Any]] | None:
  """Returns a function that reads a step's results from the metrics of its model.

  Returns None for a step that the user wrote, which may report anything.
  """
  module = getattr(getattr(model, f'{kind}_step'), '__module__', '')
  is_own = module.startswith('keras.') and kind != 'predict'
  return model.get_metrics_result if is_own else None


def without_optionals(data: Any) -> Any:
  """Returns a batch with None in place of Keras's empty optionals."""
  return tf.nest.map_structure(
    lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf,
    data,
  )


# Models whose training steps a strategy has been asked to run.
_trained_by_strategy: weakref.WeakSet[keras.Model] = weakref.WeakSet()

_checks: list[Callable[[keras.Model, str], None]] = []


def check_first(check: Callable[[keras.Model, str], None]) -> None:
  """Makes models call `check(model, kind)` before their steps."""
  _checks.append(check)


def _prepare(
  model: keras.Model, kind: str, data: trainer.TFEpochIterator | None
) -> None:
  """Prepares a model, and the data of its steps, for steps of this kind."""
  note_call()
  for check in _checks:
    check(model, kind)
  _settle(model, optimizers_of(model) if kind == 'train' else ())
  if data is not None:
    _count_distributed(data)
    extended = model.distribute_strategy.extended
    is_ours = (
      getattr(extended, 'builds_from_specs', False) and kind != 'predict'
    )
    # `fit` validates with one object in all epochs.
    if is_ours and 'catch_stop_iteration' not in vars(data):
      _follow_epochs(data, model)


def _settle(model, besides=()) -> None:
  """Lets workers meet that have trained weights apart.

  They do so before weights are used, and before an optimizer trains them that is not
  `besides`.
  """
  extended = model.distribute_strategy.extended
  local_worker = getattr(extended, 'local_worker', None)
  if local_worker is not None:
    local_worker.settle(model.variables, besides)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
  """Returns the optimizers of a model: the compiled one, and its attributes."""
  found = [
    value
    for value in (getattr(model, 'optimizer', None), *vars(model).values())
    if isinstance(value, keras.optimizers.Optimizer)
  ]
  return list({id(o): o for o in found}.values())


@contextlib.contextmanager
def _compiled_in_parts(model: keras.Model) -> Iterator[None]:
  """Lets XLA compile the parts of a step between the meetings of its replicas.

  An XLA program cannot span several devices or workers.
  """
  compiles = model.jit_compile
  if getattr(model.distribute_strategy.extended, 'splits_steps', False):
    model.jit_compile = False
  try:
    yield
  finally:
    model.jit_compile = compiles


def _compile_on_gpus(resolve: Callable) -> Callable:
  """Resolves jit_compile='auto' on GPUs as without a strategy.

  With a strategy, Keras resolves it to False.
  """

  def resolve_auto(self):
    strategy = self._distribute_strategy
    extended = self.distribute_strategy.extended
    if getattr(extended, 'compiles_by_default', False):
      self._distribute_strategy = None
    try:
      return resolve(self)
    finally:
      self._distribute_strategy = strategy

  return resolve_auto


_tf_internal.change(
  base_trainer.Trainer,
  '_resolve_auto_jit_compile()',
  _compile_on_gpus,
  "jit_compile='auto' compiles on GPUs",
)


def _pass_step(make: Callable) -> Callable:
  """Lets a strategy make the function of a step, or passes the step to it."""

  def make_with_step(self, step_function):
    """Returns the function that Keras calls for each group of steps."""
    kind = 'test' if step_function == self.test_step else 'train'
    extended = self.distribute_strategy.extended
    if hasattr(extended, 'make_step_function'):
      if kind == 'train':
        _trained_by_strategy.add(self)
      return extended.make_step_function(KerasStep(self, kind, step_function))

    def step(data):
      return step_function(data)

    compiles = bool(self.jit_compile)
    step.keras_step = KerasStep(self, kind, step_function, compiles)
    if hasattr(extended, 'guard_step'):
      return extended.guard_step(step)
    with _compiled_in_parts(self):
      function = make(self, step)
    is_once = getattr(extended, 'has_several_cpus', None)
    if is_once is None:
      return function  # The strategy is not ours.

    @functools.wraps(function)
    def run(iterator):
      note_call()
      with (
        _tf_internal.rewritten_once() if is_once else contextlib.nullcontext()
      ):
        return function(iterator)

    return run

  return make_with_step


def _pass_predict_step(make: Callable) -> Callable:
  """Does the same for `predict`, whose step Keras passes on by itself."""

  def make_with_step(self, force=False):
    caller = frame_of('predict')
    _prepare(self, 'predict', caller and caller.f_locals.get('epoch_iterator'))
    extended = self.distribute_strategy.extended
    if not hasattr(extended, 'make_step_function'):
      with _compiled_in_parts(self):
        return make(self, force)
    if force or self.predict_function is None:
      step = KerasStep(self, 'predict', self.predict_step)
      self.predict_function = extended.make_step_function(step)

  return make_with_step


_tf_internal.change(
  trainer.TensorFlowTrainer,
  '_make_function(step_function)',
  _pass_step,
  'strategies know the steps of a model',
)
_tf_internal.change(
  trainer.TensorFlowTrainer,
  'make_predict_function(force)',
  _pass_predict_step,
  'strategies know the steps of a model',
)


def _build_from_specs(build):
  """Builds variables from the types of batches instead of a batch.

  Keras would open the data set, draw a batch and drop it. A generator would
  lose the batch and its prefetched elements. A seeded shuffle would continue
  with its next order.
  """

  def build_from_specs(self, iterator=None, data_batch=None):
    """Builds the model and its metrics, if they are not built."""
    caller = sys._getframe(1).f_code.co_name
    trains = caller in ('fit', 'train_on_batch')
    _prepare(self, 'train' if trains else 'test', iterator)
    strategy = self.distribute_strategy
    # Without a cluster, 'parameter_server' is TensorFlow's strategy for one
    # device.
    is_alone = isinstance(strategy, tf.distribute.OneDeviceStrategy)
    if not getattr(strategy.extended, 'builds_from_specs', is_alone):
      return build(self, iterator, data_batch)
    own_step = getattr(self.train_step, '__module__', '')
    is_own = not own_step.startswith('keras.')
    if is_own and getattr(strategy.extended, 'makes_variables_in_steps', True):
      # A user's own step may use a batch in any way. Its variables are created
      # when it is traced, as on one device.
      return None
    if iterator is not None:
      data_batch = keras.tree.map_structure(
        _tf_internal.spec_of_part, iterator._distributed_dataset.element_spec
      )
      parts = keras.tree.flatten(data_batch)
      shapes = [p.shape for p in parts if hasattr(p, 'shape')]  # None has none.
      if any(shape.rank is None for shape in shapes):
        # The types are known only from a batch. Keras would average the
        # replicas' parts.
        _, _, batches = next(iter(iterator))
        data_batch, *_ = strategy.experimental_local_results(next(batches))
    try:
      with strategy.scope():
        _build(self, data_batch)
    except Exception:
      if not is_own or not self.weights:
        raise
      # The model cannot be called as Keras would, but already has its variables.

  return build_from_specs


_tf_internal.change(
  trainer.TensorFlowTrainer,
  '_maybe_symbolic_build(iterator, data_batch)',
  _build_from_specs,
  'a batch that Keras draws to make variables is lost',
)


def _count_distributed(data: trainer.TFEpochIterator) -> None:
  """Makes an epoch as long as the distributed data set.

  Keras counts the batches of the original data set. Workers that read their own
  data take smaller batches, and therefore more of them.
  """
  adapter = tf_dataset_adapter.TFDatasetAdapter
  distributed = data._distributed_dataset
  # Other adapters are notified when an epoch begins. All workers share their
  # batches.
  if isinstance(data.data_adapter, adapter) and isinstance(
    distributed, tf.data.Dataset
  ):
    data.data_adapter = adapter(distributed)
    data._num_batches = data.data_adapter.num_batches


def _data_being_made() -> trainer.TFEpochIterator | None:
  """Returns the data of an epoch that this thread makes, if any."""
  code = inspect.unwrap(trainer.TFEpochIterator.__init__).__code__
  frame = next((f for f in _frames() if f.f_code is code), None)
  return frame and frame.f_locals['self']


def is_for_model() -> bool:
  """Returns whether Keras distributes a data set for a model's steps, not a user's."""
  return _data_being_made() is not None


def num_steps(are_common: bool) -> int | None:
  """Returns the number of steps in the data that Keras distributes.

  Returns None if the length of the data is unknown.

  Args:
    are_common: whether all workers have the same data, so that its length counts.
  """
  name = 'num_batches' if are_common else 'steps_per_epoch'
  steps = getattr(_data_being_made(), name, None)
  return None if steps is None else int(steps)


def element_spec_of_fit(
  model: keras.Model, batches: Any, steps_per_epoch: int, class_weight: Any
) -> Any:
  """Returns the types of the batches that a model's steps get from `fit(batches)`."""
  iterator = trainer.TFEpochIterator(
    x=batches,
    shuffle=False,
    distribute_strategy=model.distribute_strategy,
    steps_per_epoch=steps_per_epoch,
    class_weight=class_weight,
  )
  return iterator._distributed_dataset.element_spec


def _follow_epochs(data: trainer.TFEpochIterator, model: keras.Model) -> None:
  """Checks and meets at the ends of each epoch over some data.

  Args:
    data: the data of an epoch.
    model: the model that `fit` or `evaluate` passes them to.
  """
  catch = data.catch_stop_iteration

  @contextlib.contextmanager
  def catch_stop_iteration():
    _check_train_function(model)
    with catch():
      yield
    _settle(model)

  data.catch_stop_iteration = catch_stop_iteration


def _check_train_function(model: keras.Model) -> None:
  """Raises for a training function that would bypass a strategy's workers."""
  strategy = model.distribute_strategy
  if (
    model.train_function is not None
    and hasattr(strategy.extended, 'make_step_function')
    and model not in _trained_by_strategy
  ):
    raise errors.UnsupportedOptionError(
      f'another one in model {model.name!r} under {type(strategy).__name__}',
      'the train_function of super().make_train_function(force)',
      'call super().make_train_function(force) and wrap self.train_function, or '
      'override train_step',
    )


def skip_steps(steps: int, reads: bool = True) -> None:
  """Makes the running `fit` begin its next epoch after `steps`.

  Callbacks do not see these steps. Call it in a callback's `on_epoch_begin`.

  Args:
    steps: number of steps to skip; whole groups of `steps_per_execution`.
    reads: whether the data contain the batches of these steps, which are dropped.
  """
  frame = frame_of('fit')
  data = frame and frame.f_locals.get('epoch_iterator')
  if data is None:
    raise errors.UnsupportedOptionError(
      'a call outside of fit',
      'an epoch that is resumed by model.fit',
      'pass the callback to model.fit',
    )
  enumerate_epoch, end = data._enumerate_iterator, object()

  def enumerate_rest():
    del data._enumerate_iterator  # Makes the next epoch complete.
    for first, last, batches in enumerate_epoch():
      if first >= steps:
        yield first, last, batches
      elif not reads:
        data._steps_seen -= data.steps_per_execution
      elif any(next(batches, end) is end for _ in range(first, last + 1)):
        return

  data._enumerate_iterator = enumerate_rest


# Under a strategy, variables are built from symbolic tensors.


def _build(model: keras.Model, batch: Any) -> None:
  """Builds the variables of a model and of its optimizer from a batch, or its types.

  Keras would treat ragged and sparse tensors as dense.
  """

  def build():
    """Calls the model, its loss and its metrics on placeholders."""
    inputs = tf.nest.map_structure(
      _placeholder,
      keras.tree.map_structure(_spec_of, batch),
      expand_composites=True,
    )
    x, y, weights = keras.utils.unpack_x_y_sample_weight(inputs)
    outputs = model(x, training=False)
    if y is None:
      return  # Only the user's own step knows the outputs for inputs alone.
    for compiled, compute, options in (
      (model._compile_metrics, model.compute_metrics, {}),
      (model._compile_loss, model._compute_loss, {'training': False}),
    ):
      if compiled is not None and not compiled.built:
        compute(x, y, outputs, weights, **options)

  parts = model._compile_metrics, model._compile_loss, *model._flatten_layers()
  if not all(part is None or part.built for part in parts):
    core.compute_output_spec(build)
  if model.optimizer is not None and not model.optimizer.built:
    model.optimizer.build(model.trainable_variables)


def _spec_of(leaf: Any) -> tf.TypeSpec | None:
  leaf = getattr(leaf, 'spec', leaf)  # Of a tensor that only a worker sees.
  if leaf is None or isinstance(leaf, tf.TypeSpec):
    return leaf
  return tf.type_spec_from_value(leaf)


def _placeholder(spec: tf.TensorSpec | None) -> tf.Tensor | None:
  return spec and tf.compat.v1.placeholder(spec.dtype, spec.shape)


# `tf.train.Checkpoint` restores a variable when a layer gets it. In a symbolic
# build the variable does not have a value yet, and Keras fails.


def _restore_when_made(register: Callable) -> Callable:
  """Lets a checkpoint restore a variable that gets its value later."""

  def register_variable(variable):
    """Notes a variable without a value, as Keras does."""
    restored = {}

    def initialize():
      for name in methods:
        delattr(variable, name)
      variable._deferred_initialize()
      if restored:
        with tf.init_scope():
          variable._restore_from_tensors(restored)

    methods = {
      # TensorFlow reads a value of this type without checking its shape.
      '_serialize_to_tensors': lambda: {
        'VARIABLE_VALUE': tf.zeros([], variable._dtype)
      },
      '_restore_from_tensors': restored.update,
      '_deferred_initialize': initialize,
    }
    vars(variable).update(methods)
    register(variable)

  return register_variable


_tf_internal.change(
  variables,
  'register_uninitialized_variable(variable)',
  _restore_when_made,
  'a model that is built after Checkpoint.restore gets the restored values',
)


def before_callbacks(
  replace: Callable[[keras.Model, list, dict[str, Any] | None, bool], list],
) -> None:
  """Makes `fit`, `evaluate` and `predict` call a function before callbacks get the model.

  Args:
    replace: returns the callbacks to use. It gets the model, the callbacks, the
      length and validation of `fit`, by the names of its arguments (None for the
      others), and whether `verbose` is 'auto'.
  """

  def set_first(set_model):
    def set_replaced(self, model):
      # All workers call `fit`, which creates a list. A list that the program
      # creates may exist on one worker only.
      made_by = sys._getframe(1).f_back
      if made_by and made_by.f_code in _CALL_CODES:
        known = made_by.f_locals
        length = _length_of_fit(known) if 'epochs' in known else None
        is_auto = known['verbose'] == 'auto'
        self.callbacks = replace(model, self.callbacks, length, is_auto)
      return set_model(self, model)

    return set_replaced

  _tf_internal.change(
    keras.callbacks.CallbackList,
    'set_model(model)',
    set_first,
    'files that callbacks write are written once, and one worker shows progress',
  )


LENGTH_OF_FIT = (
  'epochs',
  'initial_epoch',
  'validation_steps',
  'validation_freq',
)


def _length_of_fit(variables: dict[str, Any]) -> dict[str, Any]:
  """Returns the length and the validation of `fit`, given its local variables."""
  batches = variables['epoch_iterator'].num_batches
  return {
    'steps_per_epoch (or the number of batches)': batches,
    'validation_data (given or not)': variables['validation_data'] is not None,
    **{name: variables[name] for name in LENGTH_OF_FIT},
  }


def closure(fn) -> Iterator[Any]:
  """Returns the values that a local function refers to, by name."""
  for cell in getattr(fn, '__closure__', None) or ():
    with contextlib.suppress(ValueError):  # The cell is still empty.
      yield cell.cell_contents

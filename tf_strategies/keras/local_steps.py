"""`LocalSteps`: workers train apart for some steps, then meet (DiLoCo)."""

from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.keras import optimizer_wrapper


@keras.saving.register_keras_serializable(package='tf_strategies')
@optimizer_wrapper.has_options
class LocalSteps(optimizer_wrapper.OptimizerWrapper):
  """Makes each worker train `every` steps alone, after which all workers meet.

  Between two meetings, a worker trains like one device. It uses its own rows,
  weights, optimizer state and moving statistics, and nothing is sent between
  workers. The anchor is the weights after the last meeting. At a meeting, each
  worker computes the difference between the anchor and its weights. The
  differences are averaged, weighted by the rows of each worker. `outer` updates
  the anchor with this average as the gradient, and all workers continue from
  the result (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication
  Training of Language Models"). It needs a multi-worker strategy.

  With `outer=keras.optimizers.SGD(1.0)` it averages weights (local SGD). If
  also `every=1`, and `optimizer` is SGD, it is synchronous SGD.

  In `fit`, workers also meet at the end of each epoch, and before `evaluate`
  and `predict`. There, and in callbacks between epochs, all workers have the
  same weights. In the middle of an epoch, each worker has its own. In your own
  loop that calls `strategy.step(fn, [optimizer])`, call `meet` where you need
  equal weights.

  Example, in a process without TF_CONFIG (one worker):

    >>> import tf_strategies as tfs
    >>> strategy = tfs.MultiWorkerRingStrategy(devices=['CPU:0'])
    >>> with strategy.scope():
    ...   model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    ...   optimizer = LocalSteps(keras.optimizers.Adam(1e-3), every=16)
    ...   model.compile(optimizer, 'mse')
    >>> history = model.fit(tf.ones([8, 3]), tf.ones([8, 1]), verbose=0)
    >>> int(optimizer.outer.iterations)
    1

  Args:
    optimizer: optimizer of each worker, or its name or configuration. Its state
      stays on the worker, and learning rate schedules count its steps.
    every: number of steps between two meetings.
    outer: optimizer of the anchor, whose state is equal on all workers; None for
      `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`.
    name: name of this optimizer.

  Raises:
    UnsupportedOptionError: if an argument is wrong, one wrapper is inside another,
      or the strategy has no workers that could train apart.
  """

  # Moving statistics of layers, which meetings average in addition to weights. The
  # model may be alive on some workers only, so it is not kept.
  statistics: Sequence[tf.Variable] = ()

  def __init__(
    self,
    optimizer: keras.optimizers.Optimizer | str | dict,
    every: int,
    outer: keras.optimizers.Optimizer | None = None,
    name: str | None = None,
  ):
    option_checks.check_int('every', every, 1)
    if outer is None:
      outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    outer = optimizer_wrapper.optimizer_of(
      'outer', outer, 'write for instance outer=keras.optimizers.SGD(1.0)'
    )
    _check_outer(outer)
    local_worker = _local_worker()
    name = 'local_steps' if name is None else name
    super().__init__(optimizer, name)
    option_checks.check(
      self.inner_optimizer is not outer,
      'the same object as optimizer and outer',
      'two optimizers',
      'make another one for outer: each has variables of its own',
    )
    self.every, self.outer = int(every), outer
    self.anchors: list[keras.Variable] = []
    self._counters: list[keras.Variable] = []
    if local_worker is not None:
      local_worker.trains_apart = True

  @property
  def variables(self):
    """Returns the variables of both optimizers, the anchor and the counters."""
    own = [*self._counters, *self.anchors, *self.outer.variables]
    return [*self.inner_optimizer.variables, *own]

  def build(self, variables):
    """Creates the variables of both optimizers, and the anchor."""
    if self.built:
      return
    variables = list(variables)
    # Steps of all workers, and rows of this worker, since the last meeting.
    self.steps, self.rows = self._counters = [
      self.add_variable((), dtype='int64', name=name)
      for name in ('steps_since_meeting', 'rows_since_meeting')
    ]
    self.anchors = [
      self.add_variable_from_reference(
        v,
        name='anchor',
        initializer=lambda shape, dtype, v=v: tf.convert_to_tensor(v.value),
      )
      for v in variables
    ]
    with keras.name_scope(self.outer.name, caller=self.outer):
      self.outer.build(self.anchors)
    super().build(variables)
    for variable in variables:
      vars(variable)['local_steps'] = self  # See `of_variables`.

  def own_variables(
    self, model: keras.Model, optimizer: keras.optimizers.Optimizer
  ) -> list[keras.Variable]:
    """Returns the variables that differ between workers between two meetings.

    `optimizer` is this one, or a loss scale around it.
    """
    shared = {id(v) for v in (self.steps, *self.anchors, *self.outer.variables)}
    mine = [*self._weights(), *moving_statistics(model), *optimizer.variables]
    return [v for v in mine if id(v) not in shared]

  # The parts of a meeting, in the context of one replica.

  def begin(self) -> None:
    """Sets the anchor if this worker has not trained since the last meeting."""
    # This is not done in the meeting, because weights may have been loaded
    # since.
    tf.cond(
      tf.equal(self.rows.value, 0),
      lambda: _assigned(self.anchors, self._weights()),
      lambda: tf.constant(True),
    )

  def differences(self, share: tf.Tensor) -> list[tf.Tensor]:
    """Returns this worker's differences from the anchor, times its share of all
    rows.
    """
    return [
      (a.value - v.value) * tf.cast(share, a.dtype)
      for a, v in zip(self.anchors, self._weights(), strict=True)
    ]

  def finish(self, mean_differences: Sequence[tf.Tensor]) -> None:
    """Updates the anchor with the mean differences, and copies it to the weights."""
    self.outer.apply(mean_differences, self.anchors)
    _assigned(self._weights(), self.anchors)
    for counter in self._counters:
      counter.assign(tf.zeros_like(counter.value))

  def count(self, rows) -> None:
    """Counts a step on this number of rows."""
    self.steps.assign(self.steps.value + 1)
    self.rows.assign(self.rows.value + tf.cast(rows, tf.int64))

  def _weights(self):
    return _keras_internal.trainable_variables(self)

  def apply(self, grads, trainable_variables=None):
    """Applies this worker's gradients.

    Raises:
      UnsupportedOptionError: if called outside the step of a model and of
        `strategy.step(fn, [optimizer])`, or under a strategy without workers that
        could train apart.
    """
    with keras.name_scope(self.name, caller=self):
      trainable_variables = self.built_on(trainable_variables)
    local_worker = _local_worker(is_training=True)
    for variable in trainable_variables or self._weights():
      option_checks.check(
        not getattr(variable, 'overwrite_with_gradient', False),
        f'variable {variable.path!r} that its gradient overwrites (float8)',
        'variables that are updated by gradients',
        'train without quantize("float8")',
      )
    option_checks.check(
      any(self is each for each in local_worker.counted),
      'a call in another step',
      'LocalSteps.apply in the step of a model that has the optimizer as '
      'an attribute, or of strategy.step(fn, [optimizer])',
      'pass the optimizer to strategy.step: strategy.run cannot count its steps',
    )
    self.inner_optimizer.apply(grads, trainable_variables)

  def meet(self) -> None:
    """Meets if there were steps since the last meeting. All workers must call it.

    In your own loop, call it before weights are read or saved.
    """
    with _keras_internal.strategy_of(self).scope():
      _local_worker(is_training=True).settle(self._weights())

  def get_config(self):
    """Returns the configuration, including those of both optimizers."""
    return {
      **super().get_config(),
      'every': self.every,
      'outer': keras.saving.serialize_keras_object(self.outer),
    }


def of_step(step: _keras_internal.KerasStep) -> list[LocalSteps]:
  """Returns the `LocalSteps` among the optimizers of a step, if it trains.

  Raises:
    UnsupportedOptionError: if only some of the optimizers are `LocalSteps`.
  """
  optimizers = step.named
  if step.kind != 'train':
    return []
  if step.model is not None:
    optimizers = _keras_internal.optimizers_of(step.model)
  found = [in_chain(o) for o in optimizers]
  if any(found) and not all(found):
    alone = optimizers[found.index(None)]
    raise errors.UnsupportedOptionError(
      f'{type(alone).__name__} beside LocalSteps',
      'optimizers of one kind in a step',
      'wrap each optimizer of the step, LocalSteps(optimizer, every=...), and '
      'pass one to compile, which otherwise makes an RMSprop',
    )
  return found if any(found) else []


def of_variables(variables: Iterable[keras.Variable]) -> list[LocalSteps]:
  """Returns the optimizers that train some of the variables, in their order."""
  found = [vars(v).get('local_steps') for v in variables]
  return list({id(o): o for o in found if o is not None}.values())


def in_chain(optimizer) -> LocalSteps | None:
  """Returns the `LocalSteps` in a chain of wrapped optimizers, if any."""
  for each in _keras_internal.chain(optimizer):
    if isinstance(each, LocalSteps):
      return each
  return None


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
  """Returns the statistics that layers compute from rows. Excludes frozen weights."""
  return [
    v
    for v in model.non_trainable_weights
    if tf.as_dtype(v.dtype).is_floating and not v.value.trainable
  ]


def _local_worker(is_training: bool = False):
  """Returns the interface of this worker.

  Outside any strategy it returns None without `is_training`, because saved models are
  loaded there.

  Raises:
    UnsupportedOptionError: if workers cannot train apart.
  """
  is_inside = tf.distribute.has_strategy()
  strategy = tf.distribute.get_strategy()
  worker = getattr(strategy.extended, 'local_worker', None)
  if worker is None and (is_training or is_inside):
    name = type(strategy).__name__
    raise errors.UnsupportedOptionError(
      f'LocalSteps under {name}' if is_inside else 'LocalSteps in no strategy',
      *getattr(strategy.extended, 'no_local_steps', _NO_LOCAL_STEPS),
    )
  return worker


# The expected strategy, and the fix.
_NO_LOCAL_STEPS = (
  'a ring of several workers, each with weights of its own',
  'leave out LocalSteps, or start a worker for each device and use '
  "tfs.create_strategy('multi_worker_ring')",
)


def _check_outer(outer) -> None:
  what = f'outer={type(outer).__name__}(...)'
  option_checks.check(
    not hasattr(outer, 'inner_optimizer'),
    what,
    'an optimizer that wraps no other',
    'pass the inner optimizer. There is no loss to scale, and gradients '
    'are averaged already',
  )
  optimizer_wrapper.check_has_one_rule(outer, what)
  for option in ('use_ema', 'gradient_accumulation_steps'):
    if getattr(outer, option, None):
      raise errors.UnsupportedOptionError(
        f'outer={type(outer).__name__}({option}={getattr(outer, option)!r})',
        f'an outer optimizer without {option}',
        f'set {option} on the inner optimizer, or raise every',
      )


def _assigned(variables, values) -> tf.Tensor:
  """Assigns values to variables. Returns a tensor, as a branch must."""
  for variable, value in zip(variables, values, strict=True):
    variable.assign(value.value)
  return tf.constant(True)

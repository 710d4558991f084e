"""Workers that train apart for some steps, then meet; see `tfs.keras.LocalSteps`.

A model's step is still one device's program that is split over replicas, but
only over the replicas of this worker.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, option_checks
from tf_strategies.keras import local_steps as optimizers_lib
from tf_strategies.spmd import exchange
from tf_strategies.strategies.mirrored import (
  host_input,
  run_context,
  variable_copies,
  whole_batch,
)


class TrainsApart:
  """The part of a strategy that `LocalSteps` optimizers use on this worker.

  Attributes:
    trains_apart: whether a `LocalSteps` was made.
    counted: the optimizers of the step that is currently traced.
    no_local_steps: the expectation and the fix of the error, if workers cannot train
      apart.
  """

  trains_apart = False
  counted: Sequence[optimizers_lib.LocalSteps] = ()
  no_local_steps = (
    'a strategy without shard_optimizer_state',
    'leave out shard_optimizer_state, or LocalSteps. A worker that trains apart '
    'needs all of the state',
  )

  @property
  def local_worker(self) -> 'TrainsApart | None':
    """Returns this worker; None if workers hold parts of the state."""
    return self if self.state_shards is None else None

  @property
  def splits_steps(self):
    """See base class. A single worker also takes local steps."""
    return super().splits_steps or self.trains_apart

  def _model_step(self, step):
    found = optimizers_lib.of_step(step)
    return LocalStep(self, step, found) if found else super()._model_step(step)

  def count_step(self, optimizer: optimizers_lib.LocalSteps, rows) -> None:
    """Counts a step with this number of rows, and meets if it is time."""
    with self.on_first_device([optimizer.steps.value, optimizer.rows.value]):
      optimizer.count(rows)
    tf.cond(
      tf.equal(optimizer.steps.value.values[0], optimizer.every),
      lambda: self._meet(optimizer),
      lambda: tf.constant(False),
    )

  def settle(
    self,
    variables: Iterable[keras.Variable],
    besides: Iterable[keras.optimizers.Optimizer] = (),
  ) -> None:
    """Meets now with each optimizer of these variables that has counted steps.

    Python's garbage collector decides which other optimizers are alive, so those do not
    meet. Nor do those `besides`, which continue to train apart.
    """
    goes_on = [optimizers_lib.in_chain(o) for o in besides]
    for optimizer in optimizers_lib.of_variables(variables):
      if any(optimizer is each for each in goes_on):
        continue
      if optimizer.built and int(optimizer.steps.value.values[0].numpy()):
        self._meet(optimizer)

  def _meet(self, optimizer) -> tf.Tensor:
    """Updates the anchor with all workers' differences, weighted by their rows."""
    weights = _keras_internal.trainable_variables(optimizer)
    averages = _values(_keras_internal.moving_averages(optimizer))
    averages += optimizer.statistics
    written = [*_values([*optimizer.variables, *weights]), *averages]
    with self.on_first_device(written):
      optimizer.begin()
      with tf.device('CPU:0'):
        mine = tf.identity(optimizer.rows.value)
        total = self.communicator.sum(mine, 'rows_since_meeting')
        share = tf.cast(mine, tf.float64) / tf.cast(total, tf.float64)
      parts = optimizer.differences(share)
      # In float64, so that a value that is equal on all workers does not change.
      parts += [tf.cast(v, tf.float64) * share for v in averages]
      names = [*run_context.names_of(weights), *(None for _ in averages)]
      # This worker's other devices add nothing.
      zeros = [tf.zeros_like(part) for part in parts]
      columns = [parts, *(zeros for _ in self.worker_devices[1:])]
      sums, *_ = self.communicator.all_reduce(columns, 'meeting', names)
      sums = iter(sums)
      optimizer.finish([next(sums) for _ in weights])
      for variable, value in zip(averages, sums, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
    return tf.constant(True)

  @contextlib.contextmanager
  def on_first_device(self, written: Iterable[tf.Variable]) -> Iterator[None]:
    """Runs the body on one device, then copies the `written` variables to the others."""
    strategy, devices = self._container_strategy(), self.worker_devices
    with whole_batch.one_device(strategy, devices[0]):
      yield
    if len(devices) > 1:
      for variable in written:
        variable_copies.copy_first(variable)


class LocalStep(whole_batch.WholeStep):
  """A model's step on the rows of this worker, by its replicas."""

  def __init__(
    self,
    extended: TrainsApart,
    step: _keras_internal.KerasStep,
    optimizers: Sequence[optimizers_lib.LocalSteps],
  ):
    super().__init__(extended, step)
    self._optimizers = optimizers
    self._outputs: Any = None  # Results of the step, once it was traced.
    # Worker 0 draws the random numbers that one device draws.
    self._stream = extended.communicator.rank

  def run(self, data):
    """Runs the step; see base class. A worker without rows skips it.

    Raises:
      UnsupportedOptionError: if the step runs eagerly.
    """
    option_checks.check(
      not tf.executing_eagerly(),
      'one that runs eagerly',
      'a traced step with LocalSteps',
      'leave out run_eagerly=True',
    )
    data = tf.nest.map_structure(self._own, data)
    rows = tf.reduce_sum(self._counts_of(tf.nest.flatten(data)))
    run = super().run
    results = tf.cond(rows > 0, lambda: run(data), self._report)
    for optimizer in self._optimizers:
      self._extended.count_step(optimizer, rows)
    return results

  def _own(self, leaf):
    """Returns the rows of this worker's replicas of a batch."""
    if leaf is None or isinstance(leaf, tf.distribute.DistributedValues):
      return leaf
    extended = self._extended
    count = extended._num_replicas_in_sync
    return host_input.per_replica(
      host_input.split(leaf, count, extended.places)
    )

  def _sites(self, leaves):
    places = range(len(self._devices))
    sites = self._extended.sites_at(places, self._counts_of(leaves))
    sites[0].is_chief = True  # Each worker does the work that a step does once.
    return sites

  def _counts_of(self, leaves):
    """Returns the number of rows of each replica of this worker; see base class."""
    batch = host_input.first_batch(leaves)
    option_checks.check(
      batch is not None,
      'none',
      'a batch in a step with LocalSteps',
      'pass a distributed batch to the step: its rows are the weight of the '
      'step at a meeting',
    )
    return host_input.counts_of(batch)

  def _exchange(self):
    return exchange.Exchange(self._extended.local_ops)

  def _report(self):
    """Returns the results of a step without rows: those of metrics, or zeros."""
    model = self._step.model
    results = model and _keras_internal.results_of(model, self._step.kind)
    if results is not None:
      with whole_batch.one_device(self._strategy, self._devices[0]):
        return tf.nest.map_structure(tf.convert_to_tensor, results())
    return tf.nest.map_structure(_zeros, self._outputs)

  def _trace(self, data, leaves, specs):
    self._extended.counted = self._optimizers
    try:
      graph = super()._trace(data, leaves, specs)
    finally:
      self._extended.counted = ()
    self._outputs = graph.structured_outputs
    model = self._step.model
    if model is None:
      statistics = self._statistics_in(graph)
    else:
      statistics = _values(optimizers_lib.moving_statistics(model))
    # Here, because the first trace creates the variables. Operations that are built
    # afterwards also run after this.
    for optimizer in self._optimizers:
      vars(optimizer)['statistics'] = statistics  # Keras does not track them.
      with self._extended.on_first_device(_values(optimizer.anchors)):
        optimizer.begin()
    return graph

  def _statistics_in(self, graph) -> list[tf.Variable]:
    """Returns the moving statistics that a step reads or writes."""
    known = self._extended.by_handle
    used = [known.get(id(external)) for external, _ in graph.captures]
    of_optimizers = {id(v.value) for o in self._step.named for v in o.variables}
    return [
      v
      for v in used
      if v is not None
      and not (v.trainable or variable_copies.is_sum(v))
      and v.dtype.is_floating
      and id(v) not in of_optimizers
    ]


def _values(variables: Iterable[keras.Variable]) -> list[tf.Variable]:
  """Returns the TensorFlow variables of Keras variables."""
  return [v.value for v in variables]


def _zeros(tensor):
  if tensor is None:  # A step may return nothing.
    return None
  shape = [n or 0 for n in tensor.shape] if tensor.shape.rank else []
  return tf.zeros(shape, tensor.dtype)

"""Workers that train apart for some steps, then meet; see `tfs.keras.LocalSteps`.

A model's step is still one device's program that is split over replicas, but
only over the replicas of this worker.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, option_checks
from tf_strategies.keras import local_steps as optimizers_lib
from tf_strategies.spmd import site as site_lib
from tf_strategies.strategies.mirrored import extended as mirrored_extended
from tf_strategies.strategies.mirrored import (
  host_input,
  reducer,
  replica_exchange,
  whole_batch,
)


class LocalWorker:
  """The part of a strategy that `LocalSteps` optimizers use on this worker."""

  def __init__(self, extended):
    self._extended = extended
    # Whether a `LocalSteps` was made.
    self.trains_apart = False
    # Moving statistics of layers, which meetings average in addition to
    # weights. The model may be alive on some workers only, so it is not kept.
    self._statistics: weakref.WeakKeyDictionary[
      optimizers_lib.LocalSteps, list[tf.Variable]
    ] = weakref.WeakKeyDictionary()
    # The optimizers of the step that is currently traced or run eagerly.
    self._counted: Sequence[optimizers_lib.LocalSteps] = ()

  def step_of(self, step: _keras_internal.KerasStep) -> 'LocalStep | None':
    """Returns the step if it trains apart, or None for other steps.

    Raises:
      UnsupportedOptionError: if only some optimizers of the step train apart.
    """
    found = optimizers_lib.of_step(step) if step.kind == 'train' else ()
    return LocalStep(self, self._extended, step, found) if found else None

  @contextlib.contextmanager
  def counting(
    self, optimizers: Sequence[optimizers_lib.LocalSteps]
  ) -> Iterator[None]:
    """Traces a step that counts for these optimizers, inside the context."""
    before, self._counted = self._counted, optimizers
    try:
      yield
    finally:
      self._counted = before

  def check_counted(self, optimizer: optimizers_lib.LocalSteps) -> None:
    """Raises UnsupportedOptionError in a step that does not count for `optimizer`."""
    option_checks.check(
      any(optimizer is each for each in self._counted),
      'a call in another step',
      'LocalSteps.apply in the step of a model that has the optimizer as '
      'an attribute, or of strategy.step(fn, [optimizer])',
      'pass the optimizer to strategy.step: strategy.run cannot count its steps',
    )

  # Steps and meetings.

  def begin(self, optimizers: Iterable[optimizers_lib.LocalSteps]) -> None:
    """Sets missing anchors before a step."""
    for optimizer in optimizers:
      with self._on_first_device(_values(optimizer.anchors)):
        optimizer.begin()

  def end(
    self,
    optimizers: Iterable[optimizers_lib.LocalSteps],
    rows,
    statistics: list[tf.Variable],
  ) -> None:
    """Counts a step with this number of rows, and meets if it is time."""
    for optimizer in optimizers:
      self._statistics[optimizer] = statistics
      with self._on_first_device(_values([optimizer.steps, optimizer.rows])):
        optimizer.count(rows)
      tf.cond(
        tf.equal(optimizer.steps.value.values[0], optimizer.every),
        lambda optimizer=optimizer: self._meet(optimizer),
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
    averages += self._statistics.get(optimizer, [])
    written = {
      id(v): v for v in [*_values([*optimizer.variables, *weights]), *averages]
    }
    communicator = self._extended.communicator
    with self._on_first_device(written.values()):
      optimizer.begin()
      with tf.device('CPU:0'):
        mine = tf.identity(optimizer.rows.value)
        total = communicator.sum(mine, 'rows_since_meeting')
        share = tf.cast(mine, tf.float64) / tf.cast(total, tf.float64)
      means = self._sum(optimizer.differences(share), reducer.names_of(weights))
      # In float64, so that a value that is equal on all workers does not
      # change.
      sums = self._sum([tf.cast(v, tf.float64) * share for v in averages])
      optimizer.finish(means)
      for variable, value in zip(averages, sums, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
    return tf.constant(True)

  def _sum(self, tensors, gradients=()) -> list[tf.Tensor]:
    """Returns the sums over all workers; other local devices add nothing."""
    if not tensors:
      return []
    others = len(self._extended.worker_devices) - 1
    columns = [tensors, *([tf.zeros_like(t) for t in tensors],) * others]
    sums = self._extended.communicator.all_reduce(columns, 'meeting', gradients)
    return sums[0]

  @contextlib.contextmanager
  def _on_first_device(self, written: Iterable[tf.Variable]) -> Iterator[None]:
    """Runs the body on one device, then copies the `written` variables to the others."""
    extended = self._extended
    strategy, devices = extended._container_strategy(), extended.worker_devices
    with whole_batch.one_device(strategy, devices[0]):
      yield
    if len(devices) > 1:
      for variable in written:
        replica_exchange.copy_first(variable)


class LocalStep(whole_batch.WholeStep):
  """A model's step on the rows of this worker, by its replicas."""

  def __init__(
    self,
    worker: LocalWorker,
    extended,
    step: _keras_internal.KerasStep,
    optimizers: Sequence[optimizers_lib.LocalSteps],
  ):
    super().__init__(extended, step.kind, step.compiles)
    self._worker, self._optimizers, self._step = worker, optimizers, step
    self._outputs: Any = None  # Results of the step, once it was traced.
    self._statistics: list[tf.Variable] = []
    # Worker 0 draws the random numbers that one device draws.
    self._stream = extended.communicator.rank

  def run(self, fn, data):
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
    rows = tf.add_n(self._counts_of(tf.nest.flatten(data)))
    run = super().run
    with self._worker.counting(self._optimizers):
      results = tf.cond(rows > 0, lambda: run(fn, data), self._report)
    if self._step.model is not None:
      self._statistics = _values(
        optimizers_lib.moving_statistics(self._step.model)
      )
    self._worker.end(self._optimizers, rows, self._statistics)
    return results

  def _own(self, leaf):
    """Returns the rows of this worker's replicas of a batch."""
    if leaf is None or isinstance(leaf, tf.distribute.DistributedValues):
      return leaf
    extended = self._extended
    first = extended._get_replica_id_in_sync_group(0)
    places = range(first, first + len(self._devices))
    parts = host_input.split(leaf, extended._num_replicas_in_sync, places)
    return host_input.per_replica(parts)

  def _sites(self, leaves):
    counts = self._counts_of(leaves)
    if len(counts) > 1:
      rows = mirrored_extended.rows_of_replicas(counts, range(len(counts)))
    else:  # A worker without rows skips the step.
      total = tf.cast(counts[0], tf.int32)
      rows = [
        site_lib.ReplicaRows(total, tf.zeros_like(total), total, None, True)
      ]
    return [
      site_lib.Site(device, own, i, is_chief=i == 0, is_home=i == 0)
      for i, (device, own) in enumerate(zip(self._devices, rows, strict=True))
    ]

  def _counts_of(self, leaves):
    """Returns the number of rows of each replica of this worker; see base class."""
    batch = next((v for v in leaves if v is not None), None)
    option_checks.check(
      batch is not None,
      'none',
      'a batch in a step with LocalSteps',
      'pass a distributed batch to the step: its rows are the weight of the '
      'step at a meeting',
    )
    return [host_input.num_rows(part) for part in batch.values]

  def _exchange(self):
    return replica_exchange.ReplicaExchange(self._extended.local)

  def _report(self):
    """Returns the results of a step without rows: those of metrics, or zeros."""
    model = self._step.model
    results = model and _keras_internal.results_of(model, self._kind)
    if results is not None:
      with whole_batch.one_device(self._strategy, self._devices[0]):
        return tf.nest.map_structure(tf.convert_to_tensor, results())
    return tf.nest.map_structure(_zeros, self._outputs)

  def _trace(self, fn, data, leaves, specs):
    graph = super()._trace(fn, data, leaves, specs)
    self._outputs = graph.structured_outputs
    self._statistics = self._statistics_in(graph)
    # Called here because the first trace creates the variables. Operations that
    # are built afterwards also run after it.
    self._worker.begin(self._optimizers)
    return graph

  def _statistics_in(self, graph) -> list[tf.Variable]:
    """Returns the moving statistics that a step reads or writes."""
    known = self._extended.variables_by_handle()
    used = [known.get(id(external)) for external, _ in graph.captures]
    of_optimizers = {id(v.value) for o in self._step.named for v in o.variables}
    return [
      v
      for v in used
      if v is not None
      and not (v.trainable or replica_exchange.is_sum(v))
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

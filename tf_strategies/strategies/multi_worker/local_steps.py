"""Workers that train apart for some steps, and meet; see `tfs.keras.LocalSteps`.

A model's step is still one device's program that is split over replicas, but over
those of this worker alone: it gets a view of the strategy that knows no others.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.keras import gradient_reducer
from tf_strategies.keras import local_steps as optimizers_lib
from tf_strategies.spmd import site as site_lib
from tf_strategies.strategies.mirrored import extended as mirrored_extended
from tf_strategies.strategies.mirrored import (
  host_input,
  replica_exchange,
  replica_run,
  whole_batch,
)
from tf_strategies.strategies.mirrored import reducer as reducer_lib

_SUM = tf.distribute.ReduceOp.SUM


class LocalWorker:
  """What the optimizers of a strategy that train apart ask of this worker."""

  def __init__(self, extended):
    self._extended = extended
    self._reducer = reducer_lib.Reducer(extended.local)
    # What meetings average beside the weights of an optimizer: not the model, which
    # may be alive on some workers and not on others.
    self._statistics: weakref.WeakKeyDictionary[
      optimizers_lib.LocalSteps, list[keras.Variable]
    ] = weakref.WeakKeyDictionary()

  def step_of(self, step: _keras_internal.KerasStep) -> LocalStep | None:
    """The step of a model that trains apart; None for other steps.

    Raises:
      UnsupportedOptionError: a model of which only some optimizers do.
    """
    if step.kind != 'train':
      return None
    found = optimizers_lib.of_model(step.model)
    if not found:
      return None
    return LocalStep(self, _View(self._extended, self._reducer), step, found)

  def own_rows(self, data: Any) -> Any:
    """This worker's rows of batches; those that are distributed are so already."""
    communicator = self._extended.communicator

    def own(leaf):
      if isinstance(leaf, tf.distribute.DistributedValues):
        return leaf
      [part] = host_input.split(
        leaf, communicator.world_size, [communicator.rank]
      )
      return part

    return tf.nest.map_structure(own, data)

  # Steps and meetings: eagerly, and in graphs.

  def begin(self, optimizers: Iterable[optimizers_lib.LocalSteps]) -> None:
    """Before a step: sets anchors where there are none."""
    for optimizer in optimizers:
      with self._on_first_device(optimizer.anchors):
        optimizer.begin()

  def end(
    self,
    optimizers: Iterable[optimizers_lib.LocalSteps],
    rows,
    model: keras.Model | None = None,
  ) -> None:
    """Counts a step of a model on so many rows, and meets if it is time."""
    for optimizer in optimizers:
      if model is not None:
        statistics = optimizers_lib.moving_statistics(model)
        self._statistics[optimizer] = statistics
      with self._on_first_device([optimizer.steps, optimizer.rows]):
        optimizer.count(rows)
      tf.cond(
        tf.equal(optimizer.steps.value.values[0], optimizer.every),
        lambda optimizer=optimizer: self._meet(optimizer),
        lambda: tf.constant(False),
      )

  def settle(self, variables: Iterable[keras.Variable]) -> None:
    """Meets now with each optimizer of these variables that has counted steps.

    Python's garbage collector decides which other optimizers are alive, so those do not
    meet.
    """
    for optimizer in optimizers_lib.of_variables(variables):
      if optimizer.built and int(optimizer.steps.value.values[0].numpy()):
        self._meet(optimizer)

  def _meet(self, optimizer) -> tf.Tensor:
    """All workers' differences become one update of the anchor."""
    averages = optimizer.averages() + self._statistics.get(optimizer, [])
    written = {id(v): v for v in [*optimizer.variables, *averages]}
    for variable in _keras_internal.trainable_variables(optimizer):
      written[id(variable)] = variable
    communicator = self._extended.communicator
    with self._on_first_device(written.values()):
      optimizer.begin()
      with tf.device('CPU:0'):
        mine = tf.identity(optimizer.rows.value)
        total = communicator.combine(mine, 'sum', 'rows_since_meeting')
        share = tf.cast(mine, tf.float64) / tf.cast(total, tf.float64)
      weights = _keras_internal.trainable_variables(optimizer)
      means = self._sum(
        optimizer.differences(share), gradient_reducer.Gradients(weights)
      )
      # In float64, so that what is equal on all workers does not change.
      sums = self._sum([tf.cast(v.value, tf.float64) * share for v in averages])
      optimizer.finish(means)
      for variable, value in zip(averages, sums, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
    return tf.constant(True)

  def _sum(self, tensors, gradients=None) -> list[tf.Tensor]:
    """The sums over all workers; other local devices add nothing."""
    if not tensors:
      return []
    others = len(self._extended.worker_devices) - 1
    columns = [tensors, *([tf.zeros_like(t) for t in tensors],) * others]
    sums = self._extended.communicator.all_reduce(columns, 'meeting', gradients)
    return sums[0]

  @contextlib.contextmanager
  def _on_first_device(
    self, written: Iterable[keras.Variable]
  ) -> Iterator[None]:
    """One device's context; then other local devices get what was `written`."""
    extended = self._extended
    strategy, devices = extended._container_strategy(), extended.worker_devices
    with whole_batch.one_device(strategy, devices[0]):
      yield
    if len(devices) > 1:
      for variable in written:
        first, *copies = variable.value.values
        for copy in copies:
          copy.assign(first.read_value())

  def apply(self, optimizer, gradients, apply: Callable) -> None:
    """See `GradientReducer.apply_locally`."""
    if replica_run.in_branch_of_replica():
      raise errors.UnsupportedOptionError(
        'LocalSteps.apply in a branch of a replica (tf.cond), where workers '
        'cannot meet',
        'a call that every replica makes in every step',
        'call it outside of the branch, with gradients of zero where there are '
        'none',
      )
    context = tf.distribute.get_replica_context()
    dense = [g for g in gradients if g is not None]
    dense = iter(context.merge_call(self._before_apply, (optimizer, dense)))
    summed = [None if g is None else next(dense) for g in gradients]
    with self._extended.gradients_reduced():
      apply(summed)
    context.merge_call(self._after_apply, (optimizer,))

  def _before_apply(self, strategy, optimizer, gradients) -> list[Any]:
    """The sums of gradients over this worker's devices, as if over all workers."""
    del strategy
    self.begin([optimizer])
    if len(self._extended.worker_devices) > 1:
      gradients = self._reducer.batch_reduce(
        _SUM, [(g, g) for g in gradients], None
      )
    # A loop's loss is one replica's part of that of all workers' replicas.
    return [self._times_workers(g) for g in gradients]

  def _times_workers(self, gradient):
    count = self._extended.communicator.world_size
    if count == 1:
      return gradient

    def times(value):
      if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
          value.values * tf.cast(count, value.dtype),
          value.indices,
          value.dense_shape,
        )
      return value * tf.cast(count, value.dtype)

    if not isinstance(gradient, tf.distribute.DistributedValues):
      return times(gradient)
    return _tf_internal.regroup(tuple(map(times, gradient.values)))

  def _after_apply(self, strategy, optimizer) -> None:
    del strategy
    # A loop's loss says how much its rows count: workers count alike.
    self.end([optimizer], 1)


class _View:
  """A worker's `MultiWorkerExtended` without the other workers, for a step."""

  applies_all_or_none = False
  does_what_is_done_once = True
  predicts_whole = holds_sums_whole = gathers_predictions = False
  _share_rows = None

  def __init__(self, extended, reducer: reducer_lib.Reducer):
    self._extended, self._reducer = extended, reducer

  def __getattr__(self, name):
    return getattr(self._extended, name)

  @property
  def _num_replicas_in_sync(self):
    return len(self.worker_devices)

  def rows_of(self, leaves) -> list[site_lib.Rows]:
    """Which rows of this worker's each of its replicas has."""
    found = mirrored_extended.ExactMirroredExtended.rows_of(self, leaves)
    if len(found) > 1:
      return found
    # A worker without rows leaves out the step.
    total = found[0].total
    return [site_lib.Rows(total, tf.zeros_like(total), total, None, True)]

  sites_of = mirrored_extended.ExactMirroredExtended.sites_of
  static_length = mirrored_extended.ExactMirroredExtended.static_length
  _places_of_rows = mirrored_extended.ExactMirroredExtended._places_of_rows
  _shares_of_plain = mirrored_extended.ExactMirroredExtended._shares_of_plain

  def exchange(self, sites=()):
    """How the replicas of this worker meet."""
    del sites
    return replica_exchange.ReplicaExchange(self._reducer)

  one_copy = mirrored_extended.ExactMirroredExtended.one_copy
  total_of = mirrored_extended.ExactMirroredExtended.total_of


class LocalStep(whole_batch.Step):
  """A model's step on the rows of this worker, by its replicas."""

  def __init__(
    self,
    worker: LocalWorker,
    view: _View,
    step: _keras_internal.KerasStep,
    optimizers: Sequence[optimizers_lib.LocalSteps],
  ):
    super().__init__(view, step.kind, step.compiles)
    self._worker, self._optimizers, self._model = worker, optimizers, step.model
    self._outputs: Any = None  # What the step returns, once it was traced.
    # Worker 0 draws the random numbers that one device draws.
    self._stream = view.communicator.rank

  def run(self, fn, data):
    """See base class. A worker without rows leaves out the step."""
    data = self._worker.own_rows(data)
    rows = self._num_rows(tf.nest.flatten(data))
    if isinstance(rows, int):
      compute = super().run if rows else self._report
      results = compute(fn, data)
    else:
      run = super().run
      results = tf.cond(
        rows > 0, lambda: run(fn, data), lambda: self._report(fn, data)
      )
    self._worker.end(self._optimizers, rows, self._model)
    return tf.nest.map_structure(_whole, results)

  def _num_rows(self, leaves):
    counts, mine = self._extended._places_of_rows(leaves)
    counts = [counts[place] for place in mine]
    if all(isinstance(n, int) for n in counts):
      return sum(counts)
    with tf.device('CPU:0'):
      return tf.add_n([tf.cast(n, tf.int32) for n in counts])

  def _report(self, fn, data):
    """What a step without rows returns: what metrics say, or zeros."""
    results = _keras_internal.results_of(self._model, self._kind)
    if results is not None:
      with whole_batch.one_device(self._strategy, self._devices[0]):
        return tf.nest.map_structure(tf.convert_to_tensor, results())
    if self._outputs is None:  # Eagerly: only a trace tells.
      leaves = tf.nest.flatten(data)
      self._trace(fn, data, leaves, [whole_batch.spec_of(v) for v in leaves])
    return tf.nest.map_structure(_zeros, self._outputs)

  def _trace(self, fn, data, leaves, specs):
    graph = super()._trace(fn, data, leaves, specs)
    self._outputs = graph.structured_outputs
    # Here, as the first trace makes the variables. What follows in the graph that
    # is built comes after it.
    self._worker.begin(self._optimizers)
    return graph

  def _run_eagerly(self, fn, data, leaves):
    built = [o for o in self._optimizers if o.built]
    self._worker.begin(built)  # Anchors that are made in the step begin right.
    return super()._run_eagerly(fn, data, leaves)


def _zeros(tensor):
  shape = [n or 0 for n in tensor.shape] if tensor.shape.rank else []
  return tf.zeros(shape, tensor.dtype)


def _whole(value):
  if tf.is_tensor(value):
    value = tf.identity(value)
    value._tfs_is_whole = True
  return value

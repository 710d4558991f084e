"""Adapts a ring of workers to workers that come and go.

A model's step is one graph for any number of workers. It reads the rank and the number
of workers when it runs. Each worker has the whole batch and takes its rows in the step.
So when a worker has died, the others repeat the step with the same batch, cut among the
workers that are left.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _keras_internal, cross_device
from tf_strategies.strategies.mirrored import host_input, whole_batch
from tf_strategies.strategies.multi_worker import extended as extended_lib
from tf_strategies.strategies.multi_worker import input as input_lib
from tf_strategies.strategies.multi_worker import options as options_lib
from tf_strategies.strategies.multi_worker import (
  process_group_communicator,
  ring_strategy,
  strategy,
)


class ElasticExtended(extended_lib.MultiWorkerExtended):
  """Mirrored replicas of this worker, beside workers that come and go."""

  communicator: process_group_communicator.ProcessGroupCommunicator
  does_what_is_done_once = True  # By all, as anyone may become the chief.
  holds_sums_whole = splits_steps = True
  local_worker = None
  no_local_steps = (
    'workers that stay the same',
    "leave out LocalSteps, or use tfs.create_strategy('multi_worker_ring') with "
    'checkpoints. Survivors could not repeat what a dead worker has trained alone',
  )

  @property
  def _cluster_resolver(self):
    return strategy.resolver_of_group(self.communicator.group)

  @property
  def _num_replicas_in_sync(self):
    if self.communicator.is_member:
      return super()._num_replicas_in_sync
    return len(self._devices) * self.most_workers

  @property
  def _first_replica(self):
    return super()._first_replica if self.communicator.is_member else 0

  def places_in_graph(self):
    """See base class."""
    rank, world_size = tf.unstack(self.communicator.place.read_value())
    count = len(self._devices)
    places = [rank * count + replica for replica in range(count)]
    return places, world_size * count

  def _call_for_each_replica(self, fn, args, kwargs):
    self.communicator.join_group()
    return super()._call_for_each_replica(fn, args, kwargs)

  def _shares_first_value(self, options):
    # A worker gets the values when it joins. A sum begins with zero, also if a member
    # makes its metrics.
    is_sum = (
      options.get('synchronization') == tf.VariableSynchronization.ON_READ
    )
    return self.communicator.is_member and not is_sum

  def _experimental_distribute_dataset(self, dataset, options):
    if _keras_internal.is_for_model() and input_lib.is_same_data(dataset):
      # A `GuardedStep` compares the batches of workers.
      return host_input.HostDataset(dataset.prefetch(1))
    return super()._experimental_distribute_dataset(dataset, options)

  def guard_step(self, step: Callable[[Any], Any]) -> 'GuardedStep':
    """Returns the function for Keras to call: a step that survives changes of workers."""
    return GuardedStep(self, step.keras_step)


class GuardedStep:
  """A model's train or test step, called with an iterator of batches."""

  def __init__(
    self, extended: ElasticExtended, step: _keras_internal.KerasStep
  ):
    self._extended = extended
    self._membership = extended.communicator.membership
    self._model, self._kind = step.model, step.kind
    self._step = extended._model_step(step)
    self._written_early: dict[tuple, list[Any]] = {}
    self._reported: Any = None
    container = extended._container_strategy()

    @tf.autograph.experimental.do_not_convert
    def compute(batch):
      with container.scope():
        return self._step.run(batch)

    self._compute = compute
    if not self._model.run_eagerly:
      self._compute = tf.function(compute, reduce_retracing=True)

  def __call__(self, iterator):
    """Does `steps_per_execution` steps. Raises StopIteration without a batch."""
    _keras_internal.note_call()
    self._extended.communicator.join_group()
    outputs, kind = None, self._kind
    for i in range(self._model.steps_per_execution):
      try:
        batch = _keras_internal.without_optionals(next(iterator))
      except StopIteration:
        if i == 0:
          raise
        break
      outputs = self._run(batch, kind)
      kind = 'within' if kind == 'train' else kind
    return outputs

  def prepare(self, element_spec: Any) -> list[Any]:
    """Traces the step for batches of such types, of any number of rows.

    Returns the variables that a step which fails may have written.
    """
    if self._model.run_eagerly:
      return list(self._extended.by_handle.values())
    specs = tf.nest.map_structure(whole_batch.spec_of, element_spec)
    key = tuple(tf.nest.flatten(specs))
    if key not in self._written_early:
      self._compute.get_concrete_function(specs)
      self._written_early[key] = self._step.written_early
    return self._written_early[key]

  def _run(self, batch, kind):
    leaves = tf.nest.flatten(batch)
    if any(isinstance(v, tf.distribute.DistributedValues) for v in leaves):
      # The user has distributed it over the workers that there were.
      return self._membership.run_step(
        kind, lambda: self._compute(batch), lambda: None
      )
    written = self.prepare(batch)
    before = [(copy, copy.read_value()) for v in written for copy in v.values]

    def undo():
      for copy, value in before:
        copy.assign(value)

    outputs = self._membership.run_step(
      kind, lambda: self._compute(batch), undo, batch
    )
    if outputs is None:
      results = _keras_internal.results_of(self._model, self._kind)
      outputs = results() if results is not None else self._reported or {}
    self._reported = outputs
    return outputs


class ElasticRingStrategy(ring_strategy.MultiWorkerRingStrategy):
  """A `MultiWorkerRingStrategy` whose workers come and go; see `tfs.elastic`.

  A worker joins a group when it first needs one. Until then the strategy has the
  largest possible number of replicas. `membership` is the job's
  `elastic_members.Members`.
  """

  def __init__(
    self,
    membership: Any,
    options: options_lib.RingOptions,
    devices: Sequence[str] | None = None,
  ):
    devices = strategy.resolve_devices(devices)
    self._opened = contextlib.ExitStack()  # The job closes its rendezvous.
    local_ops = cross_device.AutoAllReduce()
    communicator = process_group_communicator.ProcessGroupCommunicator(
      None, devices, local_ops, options, membership
    )
    extended = ElasticExtended(self, devices, local_ops, communicator)
    tf.distribute.Strategy.__init__(self, extended)
    # Settings that must be equal on all workers, by name.
    self.set_up = {
      'devices of a worker': len(devices),
      **ring_strategy.set_up_of(options),
    }

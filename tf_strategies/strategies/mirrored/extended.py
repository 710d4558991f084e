"""What strategies of ours change in TensorFlow's mirrored implementation.

`tf.distribute.MirroredStrategy` delegates to an "extended" object. This one
routes every reduction through the strategy's own cross-device op, knows the
rows of each replica while a step runs, and lets Keras 3 synchronise inside
control flow.
"""

from __future__ import annotations

import functools
import itertools
import weakref

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, _tf_internal
from tf_strategies.keras import gradient_reducer, optimizer_checks
from tf_strategies.strategies.mirrored import (
  empty_replicas,
  host_input,
  replica_run,
  variables,
)
from tf_strategies.strategies.mirrored import reducer as reducer_lib

# Every strategy of a process needs a range of its own for its collectives, or
# they meet in each other's. TensorFlow's own strategies count from 0.
_collective_key_bases = itertools.count(1_000_000, 1_000)


class ExactMirroredExtended(
  _tf_internal.MirroredExtended, gradient_reducer.GradientReducer
):
  """TensorFlow's mirrored implementation, exact for every Keras option."""

  # Makes the rows of all workers' replicas of this worker's, if there are more.
  _share_rows = None

  def __init__(
    self,
    container_strategy,
    devices,
    cross_device_ops,
    make_local=reducer_lib.DeviceReducer,
  ):
    container_strategy._collective_key_base = next(_collective_key_bases)
    super().__init__(
      container_strategy, devices=devices, cross_device_ops=cross_device_ops
    )
    self._functions = weakref.WeakKeyDictionary()
    self._warned_uneven = False
    self.local = make_local(
      self._devices,
      self._get_cross_device_ops,
      self._communication_options,
      self._collective_ops,
    )
    self._reducer = reducer_lib.Reducer(self.local)

  def row_weight(self) -> tf.Tensor | None:
    """See `GradientReducer`. Exactly 1.0 for a batch that proves even."""
    run = replica_run.current()
    if run is None or run.is_even is True:
      return None
    return run.weight(replica_run.current_replica_id())

  # Where code runs.

  def _use_merge_call(self):
    if (
      gradient_reducer.are_gradients_reduced()
      or replica_run.in_branch_of_replica()
    ):
      return False
    return super()._use_merge_call()

  def _call_for_each_replica(self, fn, args, kwargs):
    if isinstance(fn, _tf_internal.Function):
      return self._call_function(fn, args, kwargs)
    run = replica_run.current()
    function = _tf_internal.unwrap(fn)
    if run is not None:
      # Inside a merge call of a run: the rows are that run's.
      outputs = self._call_in_run(run, fn, args, kwargs)
      if _keras_internal.is_check_finite(function):
        return self._agree_on_finite(run, outputs)
      return outputs
    optimizer_checks.check_model(function, self._container_strategy())
    run = replica_run.ReplicaRun.of(
      (args, kwargs),
      len(self._devices),
      _keras_internal.is_step(function),
      self._share_rows,
    )
    args, kwargs = empty_replicas.fill(run, (args, kwargs), self._devices)
    outputs = self._call_in_run(run, fn, args, kwargs)
    empty_replicas.check_allowed(run)
    return self._trim(run, outputs)

  def _trim(self, run, outputs):
    return empty_replicas.trim(run, outputs, self._devices)

  def _call_function(self, function, args, kwargs):
    """Runs a `tf.function`: the rows are read inside it, not baked in."""
    if _tf_internal.is_compiled(function) and all(
      'gpu' in device.lower() for device in self._devices
    ):
      # XLA compiles one device's program: each replica runs its own.
      return _tf_internal.call_for_each_replica(
        self._container_strategy(), function, args, kwargs
      )
    if function not in self._functions:
      # Not `function` itself, which the closure would keep alive forever.
      python_function = function.python_function

      def call(*args, **kwargs):
        return self._call_for_each_replica(python_function, args, kwargs)

      self._functions[function] = _tf_internal.clone_function(function, call)
    return self._functions[function](*args, **kwargs)

  def _call_in_run(self, run, fn, args, kwargs):
    if not tf.executing_eagerly():
      fn = _tf_internal.autograph_convert(fn)

    @tf.autograph.experimental.do_not_convert
    def call_replica(*args, **kwargs):
      # A replica is a thread of its own, which has to be told its run.
      with replica_run.active(run):
        return fn(*args, **kwargs)

    with replica_run.active(run):
      return _tf_internal.call_for_each_replica(
        self._container_strategy(), call_replica, args, kwargs
      )

  def _agree_on_finite(self, run, finite):
    """One answer for all: loss scaling reads the first replica's."""
    if not isinstance(finite, tf.distribute.DistributedValues):
      return finite
    answers = [
      run.select(
        i, functools.partial(tf.identity, v), lambda: tf.constant(True)
      )
      for i, v in enumerate(finite.values)
    ]
    return tf.reduce_all(tf.stack(answers))

  def _experimental_distribute_dataset(self, dataset, options):
    is_plain = isinstance(dataset, tf.data.Dataset) and options is None
    on_host = all('cpu' in device.lower() for device in self._devices)
    if is_plain and on_host and len(self._devices) > 1:
      return host_input.distribute(dataset, len(self._devices))
    return super()._experimental_distribute_dataset(dataset, options)

  # How values are reduced.

  def _get_cross_device_ops(self, value):
    if super()._use_merge_call():
      return self._cross_device_ops
    # XLA compiles one device's program: only its own collectives cross it.
    return super()._get_cross_device_ops(value)

  def _reduce_to(self, reduce_op, value, destinations, options):
    return self._reducer.reduce(reduce_op, value, destinations, options)

  def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
    return self._reducer.batch_reduce(
      reduce_op, value_destination_pairs, options
    )

  def _gather_to_implementation(self, value, destinations, axis, options):
    return self._reducer.gather(value, destinations, axis, options)

  def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
    if gradient_reducer.are_gradients_reduced():
      return value
    if not replica_run.in_branch_of_replica():
      return super()._replica_ctx_all_reduce(reduce_op, value, options)
    return self._reducer.all_reduce_in_branch(reduce_op, value, options)

  # How variables are created and updated.

  _creation_policy = staticmethod(variables.creation_policy)
  _rewrap = staticmethod(variables.rewrap)

  def _create_variable(self, next_creator, **kwargs):
    is_slot = kwargs.get('colocate_with') is not None
    kwargs = self._creation_policy(kwargs, is_slot)
    return self._rewrap(super()._create_variable(next_creator, **kwargs))

  def _update(self, var, fn, args, kwargs, group):
    self._check_update(fn)
    return super()._update(var, fn, args, kwargs, group)

  def _replica_ctx_update(self, var, fn, args, kwargs, group):
    if not gradient_reducer.are_gradients_reduced():
      self._check_update(fn)
    return super()._replica_ctx_update(var, fn, args, kwargs, group)

  def _check_update(self, fn):
    """Rejects an optimizer that would be wrong; warns of uneven batches."""
    optimizer = optimizer_checks.check_update(fn, self._container_strategy())
    run = replica_run.current()
    if optimizer is None or run is None:
      return
    run.needs_rows_everywhere = (
      run.needs_rows_everywhere
      or optimizer_checks.needs_rows_everywhere(optimizer)
    )
    if run.is_even is True or run.warning_is_built:
      return
    run.warning_is_built = True
    if run.is_even is False:
      self._warn_uneven()
    elif not _tf_internal.in_xla_context():
      # When a batch with uneven replicas really comes.
      tf.cond(
        run.is_even,
        lambda: tf.constant(0, tf.int64),
        lambda: tf.numpy_function(
          self._warn_uneven, [], tf.int64, stateful=True
        ),
      )

  def _warn_uneven(self):
    if not self._warned_uneven:
      self._warned_uneven = True
      logging.warning(
        'A batch gave the replicas different numbers of rows. The mean loss of '
        'each replica then counts the same, however few rows it has, which is '
        'not what one device computes. Wrap the optimizer: '
        'tfs.keras.DistributedOptimizer(optimizer), or drop the remainder of '
        'the last batch.'
      )
    return np.int64(0)

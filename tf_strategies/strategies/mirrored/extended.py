"""Defines our changes to TensorFlow's mirrored implementation.

`tf.distribute.MirroredStrategy` delegates to an "extended" object. This one
routes every reduction through the strategy's own cross-device op, knows the rows
of each replica while a step runs, and lets Keras 3 synchronise in control flow.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.cross_device import links
from tf_strategies.keras import optimizer_wrapper, scope_checks
from tf_strategies.spmd import exchange as exchange_lib
from tf_strategies.spmd import program
from tf_strategies.spmd import site as site_lib
from tf_strategies.strategies.mirrored import (
  host_input,
  run_context,
  sharded_state,
  variable_copies,
  variables,
  whole_batch,
)

# Options with which an optimizer changes gradients before it applies them.
_COMPUTES = (*optimizer_wrapper.CLIPPING, 'gradient_accumulation_steps')

_MEAN = tf.distribute.ReduceOp.MEAN

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class AppliesSums:
  """Sums the gradients of one step over replicas, then has them applied.

  Attributes:
    has_other_workers: whether other processes may have other values of what replicas
      share here. Then an update, which counts the step too, must not begin before all
      gradients have arrived: a step that fails must not have counted itself.
    most_workers: largest possible number of workers.
    state_shards: divides optimizer state among replicas, or None.
  """

  has_other_workers: bool = False
  most_workers: int = 1
  state_shards: sharded_state.StateShards | None = None
  _warned_undivided = False

  def apply_gradients(
    self, optimizer, grads, trainable_variables=None, **options
  ) -> None:
    """Applies gradients; the `apply` of each optimizer that is made in the scope.

    Sums them over replicas, unless they are already reduced, before Keras clips,
    accumulates or unscales them. In a model's step that is traced, marks them.

    Raises:
      UnsupportedOptionError: if it is not called in a step of the strategy, or
        replicas cannot divide state.
    """
    gradients, variables = list(grads), trainable_variables
    if variables is not None:
      variables = list(variables)

    def apply(gradients):
      type(optimizer).apply(optimizer, gradients, variables, **options)

    fix = 'pass the training step to strategy.step, or to strategy.run'
    name = f'{type(optimizer).__name__}.apply'
    if tf.distribute.get_strategy().extended is not self:
      if self.most_workers > 1:
        raise errors.UnsupportedOptionError(
          'a call outside of it', f"{name} inside the strategy's step", fix
        )
      apply(gradients)
      return
    if tf.distribute.in_cross_replica_context():
      raise errors.UnsupportedOptionError(
        'a call in cross-replica context', f'{name} inside a step', fix
      )
    shards, is_step = self.state_shards, whole_batch.is_active()
    is_alone = self._num_replicas_in_sync == 1
    if shards is not None and not is_step and not is_alone:
      raise sharded_state.loop_error(name)
    if variables is not None and not optimizer.built:
      # Built here, not later in cross-replica context or in a branch there.
      with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)
    if shards is not None:
      shards.warn(optimizer)
    trained = optimizer._trainable_variables if variables is None else variables
    if is_step and not tf.executing_eagerly():
      for i, pair in enumerate(zip(gradients, trained, strict=False)):
        if isinstance(pair[0], tf.Tensor):
          gradients[i] = self._marked(*pair)
    if is_alone or run_context.are_gradients_reduced():
      apply(gradients)
      return
    self._warn_if_undivided(gradients)
    self._apply_sums(optimizer, gradients, trained, apply)

  def _marked(self, gradient, variable) -> tf.Tensor:
    """Returns a gradient, marked as that in the graph that is being traced.

    The mark has the number of shards, of which each replica needs one.
    """
    shards = self.state_shards
    count = 1 if shards is None else shards.count_of(variable)
    [name] = run_context.names_of([variable])
    marked = tf.identity(gradient)
    values = tf.compat.v1.AttrValue.ListValue(s=[name.encode()], i=[count])
    value = tf.compat.v1.AttrValue(list=values)
    marked.op._set_attr(program.GRADIENT, value)
    return marked

  def _warn_if_undivided(self, gradients) -> None:
    """Warns once of gradients of a mean that its replica has not divided."""
    if (
      not tf.executing_eagerly()
      and not self._warned_undivided
      and _are_undivided(gradients)
    ):
      self._warned_undivided = True
      logging.warning(
        'The loss in this loop is a mean over the rows of one replica, so the '
        'gradients, which are summed over %d replicas, are %d times too large. '
        'Divide the mean by strategy.num_replicas_in_sync, use '
        'tf.nn.compute_average_loss(losses, global_batch_size=...), or use '
        'strategy.step instead of strategy.run.',
        self._num_replicas_in_sync,
        self._num_replicas_in_sync,
      )

  def _apply_sums(self, optimizer, gradients, variables, apply) -> None:
    """Calls `apply` with the sums of the replicas' gradients of some variables."""
    parts = [g for g in gradients if g is not None]
    chain = [*_keras_internal.chain(optimizer)]
    if len(chain) > 1 or optimizer_wrapper.has_any(chain[0], _COMPUTES):
      # Keras computes with these gradients. All replicas may apply one tensor
      # that was created outside the step. The copies make it count once per
      # replica.
      parts = tf.nest.map_structure(tf.identity, parts, expand_composites=True)
    trained = [
      v for g, v in zip(gradients, variables, strict=False) if g is not None
    ]

    def apply_reduced(sums):
      before = ()
      if self.has_other_workers:
        before = tf.nest.flatten(sums, expand_composites=True)
      sums = iter(sums)
      reduced = [None if g is None else next(sums) for g in gradients]
      with tf.control_dependencies(before), run_context.gradients_reduced():
        apply(reduced)

    self.reduce_and_apply(parts, apply_reduced, trained)

  def reduce_and_apply(
    self,
    gradients: Sequence[Gradient],
    apply: Callable[[Sequence[Gradient]], None],
    variables: Sequence[Any],
  ) -> None:
    """Sums this replica's gradients of `variables` over replicas.

    Passes the sums to `apply`.
    """
    reduced = list(gradients)
    if reduced:
      # The link between workers looks for this attribute of a gradient.
      options = tf.distribute.experimental.CommunicationOptions()
      options.names = run_context.names_of(variables)
      reduced = tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, reduced, options
      )
    apply(reduced)


class ExactMirroredExtended(_tf_internal.MirroredExtended, AppliesSums):
  """TensorFlow's mirrored implementation, exact for every Keras option."""

  # Every strategy in a process needs its own range of collective keys, or their
  # collectives would mix. TensorFlow's own strategies count from 0.
  _collective_key_bases = itertools.count(1_000_000, 1_000)
  # See `_keras_internal`: Keras does not draw a batch to make variables.
  builds_from_specs = True
  # True if TensorFlow cannot initialize a variable inside of a step.
  _initializes_eagerly = False
  # Whether a variable was made in the scope, even if it no longer exists.
  has_variables = False
  # If it is not None, a model's step gets a further site on this device, which is no
  # replica. It alone writes variables with one copy. Otherwise the first replica does.
  home_device: str | None = None

  def __init__(self, container_strategy, devices, cross_device_ops):
    container_strategy._collective_key_base = next(self._collective_key_bases)
    with _tf_internal.without_notices():
      super().__init__(
        container_strategy, devices=devices, cross_device_ops=cross_device_ops
      )
    scope_checks.note_created(container_strategy)
    # The op between the devices of this process.
    self.local_ops = cross_device_ops
    self._functions = weakref.WeakKeyDictionary()
    # This strategy's variables, by the `id` of the handle in traced steps.
    self.by_handle = weakref.WeakValueDictionary()
    # References to the sums over replicas, in the order of their creation.
    self._sums: list[weakref.ref] = []

  @property
  def places(self) -> range:
    """Returns the global numbers of this process's replicas."""
    first = self._get_replica_id_in_sync_group(0)
    return range(first, first + len(self._devices))

  # Where code runs.

  def _use_merge_call(self):
    if run_context.are_gradients_reduced():
      return False
    scope_checks.check_applying(self._container_strategy())
    if self.is_one_device:
      return True  # TensorFlow would use NCCL in what XLA compiles for a GPU.
    if run_context.in_branch_of_replica():
      return False
    return super()._use_merge_call()

  def _call_for_each_replica(self, fn, args, kwargs):
    if whole_batch.is_active():
      return fn(*args, **kwargs)  # The only replica calls it.
    step = _keras_internal.step_of(fn)
    if step is not None and self.splits_steps:
      [data] = args
      return self._model_step(step).run(data)
    if isinstance(fn, tf.types.experimental.PolymorphicFunction):
      return self._call_function(fn, args, kwargs)
    self._check_compiled()
    if self.is_one_device:
      args, kwargs = tf.nest.map_structure(_only_value, (args, kwargs))
      with (
        _OnlyReplica(self._container_strategy()),
        tf.device(self._devices[0]),
        scope_checks.optimizers_checked(self._container_strategy()),
      ):
        return fn(*args, **kwargs)
    run = run_context.current_run()
    if run is not None:
      # Inside a merge call of a run, which defines the rows.
      return self._call_in_run(run, fn, args, kwargs)
    run = self._run_of((args, kwargs))
    args, kwargs = _filled(run.sites, (args, kwargs))
    return _trimmed(run.sites, self._call_in_run(run, fn, args, kwargs))

  def _model_step(self, step):
    return whole_batch.WholeStep(self, step)

  # Methods that a model's step calls, when run for the whole batch.

  def sites_of(self, leaves, counts: tf.Tensor | None) -> list[site_lib.Site]:
    """Returns the sites on which a step is built for this process's replicas;
    see `spmd`.

    `counts` is `counts_of(leaves)`.
    """
    if counts is not None:
      return self.sites_at(self.places, counts)
    # All replicas have the whole batch.
    batch = next((t for t in leaves if tf.is_tensor(t) and t.shape.rank), None)
    with tf.device('CPU:0'):
      total = 0 if batch is None else host_input.num_rows(batch)
      total = tf.cast(total, tf.int32)
      places, count = self.places_in_graph()
      _, counts = host_input.share(total, tf.range(count), count)
    return self.sites_at(places, counts)

  def sites_at(self, places, counts: tf.Tensor) -> list[site_lib.Site]:
    """Returns the sites of this process's replicas.

    Args:
      places: their places among all replicas.
      counts: number of rows of each replica, int32 [N].
    """
    surely = counts.shape == [1] or _have_all_rows(counts)
    with tf.device('CPU:0'):
      ends = tf.cumsum(counts)
      if counts.shape[0] is not None:  # Numbers that are known remain so.
        counts, ends = tf.unstack(counts), tf.unstack(ends)
      total = ends[-1]
    sites = []
    for i, place in enumerate(places):
      with tf.device('CPU:0'):
        real = counts[place]
        start = ends[place] - real
        if surely:
          rows = site_lib.ReplicaRows(real, start, total, None, place == 0)
        else:
          rows = site_lib.rows_or_stand_in(real, start, total)
      if self.state_shards is not None:
        rows = dataclasses.replace(rows, place=self.places[i])
      is_chief = i == 0 and self.does_what_is_done_once
      is_home = i == 0 and self.home_device is None
      device = self.worker_devices[i]
      sites.append(site_lib.Site(device, rows, i, is_chief, is_home))
    return sites

  def counts_of(self, args) -> tf.Tensor | None:
    """Returns the numbers of rows of every replica of every worker, int32 [N].

    If no argument is a distributed batch, the result is None.
    """
    batch = host_input.first_batch(args)
    if batch is None:
      return None
    if isinstance(batch, host_input.CountedBatch):
      return batch.all_rows
    return self._share_rows(host_input.counts_of(batch))

  def _share_rows(self, rows: tf.Tensor) -> tf.Tensor:
    """Turns the rows of this worker's replicas into those of all workers."""
    return rows

  def _run_of(self, args) -> run_context.ReplicaRun:
    counts = self.counts_of(args)
    if counts is None or _have_all_rows(counts):
      return run_context.ReplicaRun()
    with tf.device('CPU:0'):
      have_rows = tf.cast(counts > 0, tf.float32)
      num_with_rows = tf.maximum(tf.reduce_sum(have_rows), 1.0)
    sites = self.sites_at(self.places, counts)
    return run_context.ReplicaRun(sites, num_with_rows)

  @property
  def is_one_device(self) -> bool:
    """Returns whether there is always one replica on one device.

    Its steps then have no operation more than without a strategy: nothing is
    reduced, counted or copied.
    """
    return len(self._devices) * self.most_workers == 1

  @property
  def has_several_cpus(self) -> bool:
    """Returns whether the replicas of this process are several, all on CPUs."""
    return len(self._devices) > 1 and all(
      'cpu' in device.lower() for device in self._devices
    )

  @property
  def splits_steps(self) -> bool:
    """Returns whether the steps of models are split over several sites."""
    return not self.is_one_device

  @property
  def compiles_by_default(self) -> bool:
    """Returns whether Keras's `jit_compile='auto'` compiles. It does on GPUs."""
    return all('gpu' in device.lower() for device in self._devices)

  # Whether this process does the work that must be done once.
  does_what_is_done_once = True
  # Whether every replica holds the whole value of sums such as metrics.
  holds_sums_whole = False

  def sums(self) -> list[tf.Variable]:
    """Returns the sums over replicas, in the order of creation.

    Workers that share parts have the same list.
    """
    return [v for v in (r() for r in self._sums) if v is not None]

  def total_of(self, variable) -> tf.Tensor:
    """Returns the value, eagerly, of a variable that is a sum over replicas."""
    return tf.add_n([copy.read_value() for copy in variable.values])

  def places_in_graph(self) -> tuple[Any, Any]:
    """Returns `places`, and the number of all; tensors if they may change."""
    return self.places, self._num_replicas_in_sync

  def step_exchange(self) -> exchange_lib.Exchange:
    """Returns the exchange in which the replicas of a step meet."""
    return exchange_lib.Exchange(self._get_cross_device_ops(None))

  def _call_function(self, function, args, kwargs):
    """Runs a `tf.function`. The rows are read inside it, so it is not retraced."""
    if (
      _tf_internal.is_compiled(function)
      and self.compiles_by_default
      and not self.is_one_device
    ):
      # XLA compiles a program for one device, so each replica runs its own.
      return _tf_internal.call_for_each_replica(
        self._container_strategy(), function, args, kwargs
      )
    if function not in self._functions:
      # The closure would keep `function` itself alive forever.
      python_function = function.python_function

      def call(*args, **kwargs):
        return self._call_for_each_replica(python_function, args, kwargs)

      self._functions[function] = _tf_internal.clone_function(function, call)
    return self._functions[function](*args, **kwargs)

  # Fix for the step of a loop that XLA cannot compile.
  compiled_fix = (
    'pass tf.function(fn, jit_compile=True) to strategy.step, or fit a model that '
    'is compiled with jit_compile=True'
  )

  def _check_compiled(self):
    """Raises if XLA compiles communication between replicas on several devices.

    XLA compiles a program for one device. Only NCCL can leave it.
    """
    if not _tf_internal.in_xla_context():
      return
    devices = sorted({*self._devices, *self.parameter_devices})
    if len(devices) > 1 and not links.nccl_is_usable(devices):
      raise errors.UnsupportedOptionError(
        f'a step of a loop on {devices}',
        'one device, or whole GPUs with NCCL, for jit_compile=True',
        self.compiled_fix,
      )

  def _call_in_run(self, run, fn, args, kwargs):
    if not tf.executing_eagerly():
      fn = _tf_internal.autograph_convert(fn)

    @tf.autograph.experimental.do_not_convert
    def call_replica(*args, **kwargs):
      # A replica runs in its own thread, which has to know its run.
      with run_context.running(run):
        return fn(*args, **kwargs)

    with run_context.running(run):
      return _tf_internal.call_for_each_replica(
        self._container_strategy(), call_replica, args, kwargs
      )

  def _experimental_distribute_dataset(self, dataset, options):
    is_plain = isinstance(dataset, tf.data.Dataset) and options is None
    if is_plain and self.has_several_cpus:
      return host_input.distribute(dataset, len(self._devices))
    return super()._experimental_distribute_dataset(dataset, options)

  # How values are reduced.

  def _get_cross_device_ops(self, value):
    self._check_compiled()
    if super()._use_merge_call():
      return self._cross_device_ops
    return super()._get_cross_device_ops(value)

  def _per_replica(self, value):
    """Returns the distributed value that `value` represents, or `value`.

    The only local replica has tensors, as under TensorFlow's strategies.
    """
    if (
      len(self._devices) > 1
      or not tf.is_tensor(value)
      or isinstance(value, tf.distribute.DistributedValues)
    ):
      return value
    return _tf_internal.PerReplica((value,))

  def _reduce_to(self, reduce_op, value, destinations, options):
    if whole_batch.is_active():
      return value
    if self.is_one_device:
      return tf.nest.map_structure(_only_value, value)

    def reduce_one(value):
      value = self._per_replica(value)
      is_shared = not isinstance(value, tf.distribute.DistributedValues)
      if reduce_op == _MEAN and _tf_internal.is_mirrored(value):
        return value
      if not is_shared or self.has_other_workers:
        pair = value, destinations
        return self._batch_reduce_to(reduce_op, [pair], options)[0]
      try:
        return super(ExactMirroredExtended, self)._reduce_to(
          reduce_op, value, destinations, options
        )
      except ValueError as error:
        raise errors.UnsupportedOptionError(
          f'{value!r}',
          f'values of replicas to reduce with {reduce_op}',
          'use a result of strategy.step as it is: it is of the whole batch',
        ) from error

    return tf.nest.map_structure(reduce_one, value)

  def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
    values = [value for value, _ in value_destination_pairs]
    if whole_batch.is_active():
      return values
    if self.is_one_device:
      return list(map(_only_value, values))
    count, sites = len(self._devices), run_context.current_sites()
    values = [
      run_context.per_replica(reduce_op, self._per_replica(value), count)
      for value in values
    ]
    if sites:
      values = run_context.masked(sites, values)
    # If a destination is the value itself, it means the value's devices.
    pairs = [
      (new, new if destination is old else destination)
      for new, (old, destination) in zip(
        values, value_destination_pairs, strict=True
      )
    ]
    ops = self._get_cross_device_ops(values[0])
    if not sites or reduce_op != _MEAN:
      return ops.batch_reduce(reduce_op, pairs, options)
    sums = ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs, options)
    count = run_context.current_run().num_with_rows
    return [run_context.divided(total, count) for total in sums]

  def _gather_to_implementation(self, value, destinations, axis, options):
    if self.is_one_device:
      return _only_value(value)
    value, sites = self._per_replica(value), run_context.current_sites()
    if not isinstance(value, tf.distribute.DistributedValues):
      if not self.has_other_workers:
        return value
    elif sites:
      value = _mapped(sites, lambda s, t: s.real_rows(t, axis), value)
      destinations = value if len(sites) > 1 else destinations
    ops = self._get_cross_device_ops(value)
    return ops._gather(value, destinations, axis, options)

  def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
    if run_context.are_gradients_reduced():
      return value
    if not run_context.in_branch_of_replica():
      return super()._replica_ctx_all_reduce(reduce_op, value, options)
    if len(self._devices) > 1:
      raise run_context.branch_error()
    pairs = [(part, part) for part in tf.nest.flatten(value)]
    reduced = self._batch_reduce_to(reduce_op, pairs, options)
    return tf.nest.pack_sequence_as(value, reduced)

  # How variables are created and updated.

  _creation_policy = staticmethod(variables.creation_policy)
  _rewrap = staticmethod(variables.rewrap)

  def _create_variable(self, next_creator, **kwargs):
    if _keras_internal.is_sample():
      return next_creator(**kwargs)
    _keras_internal.see_gradients(self.apply_gradients)
    if self.state_shards is not None and self.state_shards.divides(kwargs):
      initial_value = self._get_variable_creator_initial_value(
        0, self._devices[0], None, **kwargs
      )
      return self.state_shards.create(kwargs, initial_value)
    kwargs = self._creation_policy(kwargs)
    # Created now, outside the step. In the step, TensorFlow would check each
    # time whether it exists, and workers could not share the first value.
    value = kwargs.get('initial_value')
    is_of_keras = _keras_internal.initial_shape(value) is not None
    is_now = whole_batch.is_active() or is_of_keras or self._initializes_eagerly
    is_lifted = tf.compat.v1.executing_eagerly_outside_functions()
    if is_now and is_lifted and not tf.executing_eagerly():
      # A constant may be a tensor of the step's graph, as Nadam's is.
      kwargs['initial_value'] = _tf_internal.lift(value)
      with tf.init_scope():
        variable = super()._create_variable(_tf_internal.create_now, **kwargs)
    else:
      variable = super()._create_variable(next_creator, **kwargs)
    variable = self._rewrap(variable)
    if isinstance(variable, tf.distribute.DistributedValues):
      self.has_variables = True
      self.by_handle[id(variable.values[0].handle)] = variable
      if variable_copies.is_sum(variable):
        self._sums.append(weakref.ref(variable))
    return variable

  def _update(self, var, fn, args, kwargs, group):
    given = [var, *args], kwargs
    if tf.executing_eagerly() and sharded_state.is_among(given):
      return self.state_shards.update(fn, *given)
    return super()._update(var, fn, args, kwargs, group)


class _OnlyReplica(tf.distribute.ReplicaContext):
  """The context of the only replica, as without a strategy."""

  def __init__(self, strategy):
    super().__init__(strategy, 0)

  @property
  def replica_id_in_sync_group(self):
    """Replica number as a Python zero, which adds no operation."""
    return 0


def _only_value(value):
  """Returns the only replica's part of a value. It is a variable of the strategy itself."""
  is_variable = isinstance(value, tf.Variable)
  if is_variable or not isinstance(value, tf.distribute.DistributedValues):
    return value
  return value.values[0]


def _filled(sites: Sequence[site_lib.Site], args):
  """Returns `args` with one row of zeros for each replica without rows.

  On zero rows, BatchNormalization computes 0/0, and oneDNN's max-pooling gradient
  aborts the process. Batches that contain ragged or sparse components do not change,
  because their components must keep the same rows.
  """
  composite = tf.RaggedTensor | tf.SparseTensor
  is_per_replica = _tf_internal.PerReplica
  if not sites or any(
    isinstance(leaf, is_per_replica) and isinstance(leaf.values[0], composite)
    for leaf in tf.nest.flatten(args)
  ):
    return args

  def fill(value):
    if not isinstance(value, _tf_internal.PerReplica):
      return value
    first = value.values[0]
    if (
      not isinstance(first, tf.Tensor)
      or first.shape.rank == 0
      or not first.dtype.is_numpy_compatible
    ):
      return value
    return _mapped(sites, lambda _, t: host_input.one_row_if_empty(t), value)

  return tf.nest.map_structure(fill, args)


def _trimmed(sites: Sequence[site_lib.Site], outputs):
  """Returns `outputs` without the results of replicas without rows.

  Batched tensors (their leading dimension is unknown in a graph, one in eager
  mode) lose their padding row. All other values become zero.
  """
  if not sites:
    return outputs

  def trim_tensor(site, tensor):
    if not isinstance(tensor, tf.Tensor):
      return tensor
    if tensor.shape.rank and tensor.shape[0] in (None, 1):
      return site.real_rows(tensor)
    return site.contributions([tensor])[0]

  def trim_value(value):
    if isinstance(value, _tf_internal.PerReplica):
      return _mapped(sites, trim_tensor, value)
    if len(sites) == 1:
      return trim_tensor(sites[0], value)
    return value

  return tf.nest.map_structure(trim_value, outputs)


def _mapped(sites, fn, value):
  """Maps each replica's site and tensor, on its device."""
  return _tf_internal.PerReplica(site_lib.at_each(sites, fn, value.values))


def _have_all_rows(counts) -> bool:
  """Returns whether all replicas are known to have rows."""
  known = tf.get_static_value(counts)
  return known is not None and bool(np.all(known > 0))


def _are_undivided(gradients) -> bool:
  """Returns whether gradients come from a tape, of a loss with an undivided mean.

  The gradient of the loss is 1. It is still 1 at a term that is not scaled.
  """
  tensors = tf.nest.flatten(gradients, expand_composites=True)
  todo = [t.op for t in tensors if tf.is_symbolic_tensor(t)]
  seen = set()
  while todo:
    op = todo.pop()
    is_of_tape = op.type == 'AddN' or op.name.startswith('gradient_tape/')
    if op.name in seen or not is_of_tape:
      continue
    seen.add(op.name)
    # The gradient of a mean over everything is a tile, divided by the number.
    if op.type == 'RealDiv' and op.inputs[0].shape.rank != 0:
      tensor = op.inputs[0]
      while tensor.op.type in ('Tile', 'BroadcastTo', 'Reshape'):
        tensor = tensor.op.inputs[0]
      if tensor.shape.rank == 0 and tf.get_static_value(tensor) == 1:
        return True
    todo += [t.op for t in op.inputs]
  return False

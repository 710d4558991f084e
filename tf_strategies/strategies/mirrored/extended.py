"""Defines our changes to TensorFlow's mirrored implementation.

`tf.distribute.MirroredStrategy` delegates to an "extended" object. This one
routes every reduction through the strategy's own cross-device op, knows the rows
of each replica while a step runs, and lets Keras 3 synchronise in control flow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from typing import Any

import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.cross_device import links
from tf_strategies.keras import gradient_reducer, scope_checks
from tf_strategies.spmd import exchange as exchange_lib
from tf_strategies.spmd import site as site_lib
from tf_strategies.strategies.mirrored import (
  host_input,
  replica_exchange,
  replica_run,
  sharded_state,
  variables,
  whole_batch,
)
from tf_strategies.strategies.mirrored import reducer as reducer_lib


class ExactMirroredExtended(
  _tf_internal.MirroredExtended, gradient_reducer.GradientReducer
):
  """TensorFlow's mirrored implementation, exact for every Keras option."""

  # Every strategy in a process needs its own range of collective keys, or their
  # collectives would mix. TensorFlow's own strategies count from 0.
  _collective_key_bases = itertools.count(1_000_000, 1_000)
  # Turns the rows of this worker's replicas into those of all workers, if there
  # are more.
  _share_rows = None
  # See `_keras_internal`: Keras does not draw a batch to make variables.
  builds_from_specs = True
  makes_variables_in_steps = True
  # True if TensorFlow cannot initialize a variable inside of a step.
  _initializes_eagerly = False
  _warned_undivided = False
  # Whether a variable was made in the scope, even if it no longer exists.
  has_variables = False
  # If it is not None, a model's step gets a further site on this device, which is no
  # replica. It alone writes variables with one copy. Otherwise the first replica does.
  home_device: str | None = None
  # Divides optimizer state among replicas, or None.
  state_shards: sharded_state.StateShards | None = None

  def __init__(
    self,
    container_strategy,
    devices,
    cross_device_ops,
    make_local=reducer_lib.DeviceReducer,
  ):
    container_strategy._collective_key_base = next(self._collective_key_bases)
    with _tf_internal.without_notices():
      super().__init__(
        container_strategy, devices=devices, cross_device_ops=cross_device_ops
      )
    scope_checks.note_created(container_strategy)
    self._functions = weakref.WeakKeyDictionary()
    # By the `id` of the first copy's handle.
    self._variables = weakref.WeakValueDictionary()
    self.local = make_local(
      self._devices,
      self._get_cross_device_ops,
      self._communication_options,
    )
    self._reducer: reducer_lib.Reducer = self.local

  def mark_of(self, variable):
    """See base class. Gradients are marked in a model's step that is traced."""
    if not whole_batch.is_active() or tf.executing_eagerly():
      return None
    shards = self.state_shards
    return 1 if shards is None else shards.count_of(variable)

  def prepare(self, optimizer, variables):
    """See base class. Warns of state that replicas cannot divide."""
    shards, is_loop = self.state_shards, not whole_batch.is_active()
    if shards is not None and is_loop and self._num_replicas_in_sync > 1:
      raise sharded_state.loop_error(f'{type(optimizer).__name__}.apply')
    super().prepare(optimizer, variables)
    if shards is not None:
      shards.warn(optimizer)

  def warn_if_undivided(self, gradients):
    """See base class. Warns once, and of steps in a graph only."""
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

  def place_of(self, replica: int) -> int | None:
    """Returns the global number of a local replica, if state is divided."""
    if self.state_shards is None:
      return None
    return self._get_replica_id_in_sync_group(replica)

  # Where code runs.

  def _use_merge_call(self):
    if gradient_reducer.are_gradients_reduced():
      return False
    scope_checks.check_applying(self._container_strategy())
    if self.is_one_device:
      return True  # TensorFlow would use NCCL in what XLA compiles for a GPU.
    if replica_run.in_branch_of_replica():
      return False
    return super()._use_merge_call()

  def _call_for_each_replica(self, fn, args, kwargs):
    if whole_batch.is_active():
      return fn(*args, **kwargs)  # The only replica calls it.
    step = _keras_internal.step_of(_tf_internal.unwrap(fn))
    if step is not None and self.splits_steps:
      [data] = args
      return self._model_step(step).run(step.run, data)
    if isinstance(fn, _tf_internal.Function):
      return self._call_function(fn, args, kwargs)
    self._check_compiled()
    if self.is_one_device:
      args, kwargs = tf.nest.map_structure(_only_argument, (args, kwargs))
      with (
        _OnlyReplica(self._container_strategy()),
        tf.device(self._devices[0]),
        scope_checks.optimizers_checked(self._container_strategy()),
      ):
        return fn(*args, **kwargs)
    run = replica_run.current()
    if run is not None:
      # Inside a merge call of a run, which defines the rows.
      return self._call_in_run(run, fn, args, kwargs)
    run = self._run_of((args, kwargs))
    args, kwargs = replica_run.fill(run, (args, kwargs))
    return replica_run.trim(run, self._call_in_run(run, fn, args, kwargs))

  def _model_step(self, step):
    return whole_batch.WholeStep(self, step.kind, step.compiles)

  # Methods that a model's step calls, when run for the whole batch.

  def variables_by_handle(self) -> dict[int, tf.Variable]:
    """Returns this strategy's variables, by the `id` of the first copy's handle."""
    found = dict(self._variables)
    if self.state_shards is not None:
      found.update(self.state_shards.by_handle)
    return found

  def _rows_of_counts(self, counts) -> list[site_lib.ReplicaRows]:
    first = self._get_replica_id_in_sync_group(0)
    return rows_of_replicas(counts, range(first, first + len(self._devices)))

  def sites_of(self, leaves) -> list[site_lib.Site]:
    """Returns the sites on which a step is built for this process's replicas;
    see `spmd`.
    """
    counts = self.counts_of(leaves)
    if counts is None:
      return self._sites_with(self._rows_of_plain(leaves))
    return self._sites_with(self._rows_of_counts(counts))

  def _sites_with(self, rows_of_all) -> list[site_lib.Site]:
    sites = []
    for i, (device, rows) in enumerate(
      zip(self.worker_devices, rows_of_all, strict=True)
    ):
      is_chief = i == 0 and self.does_what_is_done_once
      is_home = i == 0 and self.home_device is None
      rows = dataclasses.replace(rows, place=self.place_of(i))
      sites.append(site_lib.Site(device, rows, i, is_chief, is_home))
    return sites

  def _rows_of_plain(self, leaves) -> list[site_lib.ReplicaRows]:
    """Returns the rows of this process's replicas of a batch that all replicas have."""
    count, (rank, num_workers) = len(self._devices), self.place()
    batch = next((t for t in leaves if tf.is_tensor(t) and t.shape.rank), None)
    with tf.device('CPU:0'):
      total = 0 if batch is None else replica_run.num_rows(batch)
      total = tf.cast(total, tf.int32)
      found = []
      for replica in range(count):
        start, real = host_input.share(
          total, rank * count + replica, num_workers * count
        )
        found.append(site_lib.rows_or_stand_in(real, start, total))
    return found

  def counts_of(self, args) -> tuple[Any, ...] | None:
    """Returns the number of rows of every replica; see `replica_run.rows_of`."""
    return replica_run.rows_of(args, len(self._devices), self._share_rows)

  def _run_of(self, args) -> replica_run.ReplicaRun:
    counts = self.counts_of(args)
    if counts is None or _have_all_rows(counts):
      return replica_run.ReplicaRun()
    with tf.device('CPU:0'):
      have_rows = tf.cast(tf.stack(counts) > 0, tf.float32)
      num_with_rows = tf.maximum(tf.reduce_sum(have_rows), 1.0)
    sites = self._sites_with(self._rows_of_counts(counts))
    return replica_run.ReplicaRun(sites, num_with_rows)

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

  @contextlib.contextmanager
  def one_copy(self, is_first: bool):
    """Makes the first copies of variables count alone inside the context.

    Afterwards, the other copies are set equal to them. For a sum over replicas,
    the first process keeps the whole sum.
    """
    used = []

    def make_whole(variable):
      if self.holds_sums_whole:
        variable.hold_whole()
      else:
        used.append(variable)
        replica_exchange.set_copies(variable, self.total_of(variable))

    with whole_batch.uses_noted(self, make_whole):
      yield
    for variable in [] if is_first else used:
      zero = tf.zeros_like(variable.values[0])
      replica_exchange.set_copies(variable, zero)
    for variable in list(self._variables.values()):
      if not replica_exchange.is_sum(variable):
        replica_exchange.copy_first(variable)

  def total_of(self, variable) -> tf.Tensor:
    """Returns the value, eagerly, of a variable that is a sum over replicas."""
    return tf.add_n([copy.read_value() for copy in variable.values])

  def place(self) -> tuple[Any, Any]:
    """Returns this process's rank among the workers, and the number of workers."""
    return 0, 1

  def exchange(self) -> exchange_lib.Exchange:
    """Returns the exchange in which the replicas of a step meet."""
    return replica_exchange.ReplicaExchange(self._reducer)

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
      with replica_run.active(run):
        return fn(*args, **kwargs)

    with replica_run.active(run):
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

  def _reduce_to(self, reduce_op, value, destinations, options):
    if whole_batch.is_active():
      return value
    if self.is_one_device:
      return tf.nest.map_structure(_only_value, value)
    return self._reducer.reduce(reduce_op, value, destinations, options)

  def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
    values = [value for value, _ in value_destination_pairs]
    if whole_batch.is_active():
      return values
    if self.is_one_device:
      return list(map(_only_value, values))
    return self._reducer.batch_reduce(
      reduce_op, value_destination_pairs, options
    )

  def _gather_to_implementation(self, value, destinations, axis, options):
    if self.is_one_device:
      return _only_value(value)
    return self._reducer.gather(value, destinations, axis, options)

  def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
    if gradient_reducer.are_gradients_reduced():
      return value
    if not replica_run.in_branch_of_replica():
      return super()._replica_ctx_all_reduce(reduce_op, value, options)
    if len(self._devices) > 1:
      raise replica_run.branch_error()
    values = [_tf_internal.PerReplica((t,)) for t in tf.nest.flatten(value)]
    reduced = self._reducer.batch_reduce(
      reduce_op, [(v, v) for v in values], options
    )
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
    is_slot = kwargs.get('colocate_with') is not None
    kwargs = self._creation_policy(kwargs, is_slot)
    # Created now, outside the step. In the step, TensorFlow would check each
    # time whether it exists, and workers could not share the first value.
    is_of_keras = _keras_internal.is_of_keras(kwargs.get('initial_value'))
    is_now = whole_batch.is_active() or is_of_keras or self._initializes_eagerly
    if is_now and _is_in_function():
      # A constant may be a tensor of the step's graph, as Nadam's is.
      value = _tf_internal.lift(kwargs.get('initial_value'))
      kwargs['initial_value'] = value
      with tf.init_scope():
        variable = super()._create_variable(_tf_internal.create_now, **kwargs)
    else:
      variable = super()._create_variable(next_creator, **kwargs)
    variable = self._rewrap(variable)
    if isinstance(variable, tf.distribute.DistributedValues):
      self.has_variables = True
      self._variables[id(variable.values[0].handle)] = variable
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
  """Returns the only replica's part of a value."""
  is_distributed = isinstance(value, tf.distribute.DistributedValues)
  return value.values[0] if is_distributed else value


def _only_argument(value):
  """Returns `_only_value(value)`, but variables of the strategy unchanged."""
  return value if isinstance(value, tf.Variable) else _only_value(value)


def rows_of_replicas(counts, places) -> list[site_lib.ReplicaRows]:
  """Returns the rows of a batch that some replicas have.

  Args:
    counts: number of rows of each replica, int or int32.
    places: positions of the replicas among all.
  """
  surely = _have_all_rows(counts)
  with tf.device('CPU:0'):
    counts = [tf.cast(n, tf.int32) for n in counts]
    ends = tf.unstack(tf.cumsum(tf.stack(counts)), num=len(counts))
    found = []
    for place in places:
      real, total = counts[place], ends[-1]
      start = ends[place] - real
      if surely:
        found.append(site_lib.ReplicaRows(real, start, total, None, place == 0))
      else:
        found.append(site_lib.rows_or_stand_in(real, start, total))
  return found


def _have_all_rows(counts) -> bool:
  """Returns whether all replicas are known to have rows."""
  return all(isinstance(n, int) and n > 0 for n in counts)


def _is_in_function() -> bool:
  """Returns whether a function is being traced while eager mode is on outside."""
  is_eager = tf.compat.v1.executing_eagerly_outside_functions()
  return is_eager and not tf.executing_eagerly()


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

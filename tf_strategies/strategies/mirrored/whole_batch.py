"""Keras's steps: traced once for the whole batch, and split over the replicas.

A model's train, test or predict step is written for one device. It is traced as
one device would run it, with one copy of each variable and all rows of the
batch. From this, `spmd` builds each replica's program for its rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.keras import scope_checks
from tf_strategies.spmd import emit, kinds, plan, program
from tf_strategies.spmd import exchange as exchange_lib
from tf_strategies.spmd import rules as _rules  # noqa: F401  Registers them.
from tf_strategies.spmd import site as site_lib
from tf_strategies.strategies.mirrored import (
  host_input,
  run_context,
  variable_copies,
)


class _CurrentStep(threading.local):
  is_active = False
  stream = 0


_state = _CurrentStep()


def is_active() -> bool:
  """Returns whether the calling thread runs a step as one device would."""
  return _state.is_active


def stream() -> int:
  """Returns the number of the random stream of this thread's step; 0 is one device's."""
  return _state.stream


class _OneDevice(_tf_internal.OneDeviceContext):
  """The context of a step: it appears to be the only replica."""

  def __init__(self, strategy):
    super().__init__(
      strategy, strategy.extended._get_replica_id_in_sync_group(0)
    )

  @property
  def num_replicas_in_sync(self):
    """Number of replicas: one."""
    return 1

  def _merge_call(self, merge_fn, args, kwargs):
    return merge_fn(self._strategy, *args, **kwargs)

  def all_reduce(self, reduce_op, value, options=None):
    """Returns `value` unchanged, because there is one replica."""
    del reduce_op, options
    return value

  def all_gather(self, value, axis, options=None):
    """Returns `value` unchanged, because there is one replica."""
    del axis, options
    return value


@contextlib.contextmanager
def one_device(strategy, device: str, stream: int = 0):
  """Makes a strategy's variables and hooks behave like one device's in the context.

  Use different `stream` numbers to draw different random numbers.
  """
  before = _state.is_active, _state.stream
  _state.is_active, _state.stream = True, stream
  try:
    with (
      run_context.gradients_reduced(),
      _OneDevice(strategy),
      tf.device(device),
    ):
      yield
  finally:
    _state.is_active, _state.stream = before


def _packed(structure, tensors):
  """Returns a structure with these tensors in place of its own. None stays None."""
  flat = [
    None if t is None else next(tensors)
    for t in tf.nest.flatten(structure, expand_composites=True)
  ]
  return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _Resource:
  """Stands for a variable or table in a traced step, which has only its handle.

  By default it is one that was created outside the scope. One that `is_single`
  exists once, and the home alone writes it.
  """

  variable: Any = None
  shard: kinds.Shard | None = None
  is_part: bool = False
  is_single: bool = True


class WholeStep:
  """Builds a model's step for the replicas of a strategy."""

  _stream = 0

  def __init__(self, extended, step: _keras_internal.KerasStep):
    self._extended, self._step = extended, step
    self._devices = extended.worker_devices
    self._strategy = extended._container_strategy()
    # Variables that a failed step may already have written.
    self.written_early: list[Any] = []

  def run(self, data):
    """Computes the step with all replicas, as one device would.

    `data` is a structure of distributed or whole batches. Results are tensors,
    not distributed values.
    """
    leaves = tf.nest.flatten(data)
    if tf.executing_eagerly():
      return self._run_eagerly(data, leaves)
    specs = [spec_of(leaf) for leaf in leaves]
    sites = self._sites(leaves)
    try:
      graph = self._trace(data, leaves, specs)
    except (AssertionError, TypeError, ValueError) as error:
      specs, graph = self._trace_with_length(data, leaves, specs, error)
      planned = self._plan(graph, leaves, specs, sites, is_whole=True)
    else:
      try:
        planned = self._plan(graph, leaves, specs, sites)
      except errors.UnsupportedOptionError as error:
        self._warn_of_whole(error)
        planned = self._plan(graph, leaves, specs, sites, is_whole=True)
    wanted = [(t, kinds.WHOLE) for t in planned.program.outputs]
    early = planned.meet_first(wanted, self._extended.has_other_workers)
    self.written_early = [r.variable for r in early if r.variable is not None]
    compiled = frozenset()
    if self._step.compiles:
      compiled = _tf_internal.compiled_operations(self._devices[0])
    emitter = emit.Emitter(planned, sites, self._exchange(), compiled)
    [results] = emitter.run(wanted, sites[:1])
    return _packed(graph.structured_outputs, iter(results))

  def _plan(self, graph, leaves, specs, sites, is_whole=False):
    """Returns the plan of a step. With `is_whole`, each replica computes all rows."""
    inputs, arguments, values = self._arguments(
      graph, leaves, specs, sites, is_whole
    )
    outputs = [
      t
      for t in tf.nest.flatten(graph.structured_outputs, expand_composites=True)
      if t is not None
    ]
    traced = program.flatten(graph, inputs, outputs)
    planned = plan.make(traced, values)
    for tensor, argument in zip(traced.inputs, arguments, strict=True):
      for site, built in argument.items():
        site.tensors[tensor, kinds.AS_IS] = built
    return planned

  def _warn_of_whole(self, reason):
    logging.warning(
      'Each replica computes all rows of the batch of a %s step. Results are correct, '
      'but not faster than on one device: %s',
      self._step.kind,
      reason,
    )

  def _trace_with_length(self, data, leaves, specs, error):
    """Returns the specs and the graph of a step that needs the length of the batch.

    Raises:
      UnsupportedOptionError: if the length is known only when the batch arrives.
      Exception: `error`, if it has another cause.
    """
    if isinstance(error, errors.Error):
      raise error
    counts = tf.get_static_value(self._counts_of(leaves))
    known = None if counts is None else int(counts.sum())
    length = known or 4 * self._strategy.num_replicas_in_sync

    def with_length(spec):
      if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
      return tf.TensorSpec([length, *spec.shape[1:]], spec.dtype)

    specs = [with_length(spec) for spec in specs]
    try:
      graph = self._trace(data, leaves, specs)
    except Exception:
      raise error from None
    fix = 'read keras.ops.shape(x)[0] or tf.shape(x)[0] instead of x.shape[0]'
    if known is None:
      raise errors.UnsupportedOptionError(
        f'a {self._step.kind} step that needs the length of a batch before it runs '
        f'({error!r})',
        'a length that the step reads when it runs',
        fix,
      ) from error
    self._warn_of_whole(
      f'it needs the length of a batch before it runs ({error!r}). Let it {fix}'
    )
    return specs, graph

  def _trace(self, data, leaves, specs):
    def step(tensors):
      tensors = iter(tensors)
      given = [
        leaf if spec is None else next(tensors)
        for leaf, spec in zip(leaves, specs, strict=True)
      ]
      given = tf.nest.pack_sequence_as(data, given)
      with (
        one_device(self._strategy, self._devices[0], self._stream),
        scope_checks.optimizers_checked(self._strategy),
      ):
        # A returned variable is read here, as one device's.
        return tf.nest.map_structure(_read, self._step.run(given))

    step = tf.autograph.experimental.do_not_convert(step)
    return _tf_internal.trace(
      f'{self._step.kind}_step', step, [[s for s in specs if s is not None]]
    )

  def _run_eagerly(self, data, leaves):
    """Runs a step in Python, on the first device. Replicas cannot share it."""
    leaves = [
      tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
      for leaf in leaves
    ]
    sites = self._sites(leaves)
    whole = [self._whole(leaf, sites) for leaf in leaves]
    whole = tf.nest.pack_sequence_as(data, whole)
    with (
      self._one_copy(),
      one_device(self._strategy, self._devices[0], self._stream),
    ):
      return self._step.run(whole)

  @contextlib.contextmanager
  def _one_copy(self) -> Iterator[None]:
    """Makes the first copies of variables count alone inside the context.

    The first copy of a sum over replicas gets the whole sum. The step may call any
    function, so this includes all sums. They and their order are the same on all
    workers, so this may be a collective.

    Afterwards, the other copies are set equal to the first. Of a sum, the first process
    keeps the whole.
    """
    extended = self._extended
    for variable in extended.sums():
      if not extended.holds_sums_whole:
        variable_copies.set_copies(variable, extended.total_of(variable))
      elif not variable.has_parts():
        # The variable itself refuses a step that uses parts which a loop has made.
        variable.hold_whole()
    yield
    for variable in list(extended.by_handle.values()):
      if variable_copies.is_sum(variable):
        if not extended.does_what_is_done_once:
          zero = tf.zeros_like(variable.values[0])
          variable_copies.set_copies(variable, zero)
      elif 'shard' not in vars(variable):
        variable_copies.copy_first(variable)

  def _whole(self, leaf, sites):
    """Returns all rows of a batch."""
    if not isinstance(leaf, tf.distribute.DistributedValues):
      return leaf
    exchange = self._exchange()
    replicas = [s for s in sites if s.replica is not None]

    # Keeps padding: an empty replica has no values.
    def gather(values):
      return exchange.gather(list(values), 0, sites[:1])[0]

    values = leaf.values
    if isinstance(values[0], tf.RaggedTensor):
      lengths = zip(*(v.nested_row_lengths() for v in values), strict=True)
      return tf.RaggedTensor.from_nested_row_lengths(
        gather(v.flat_values for v in values), [gather(n) for n in lengths]
      )
    if isinstance(values[0], tf.SparseTensor):
      indices = []
      for site, value in zip(replicas, values, strict=True):
        column = tf.cast(site.rows.start, tf.int64) + value.indices[:, :1]
        indices.append(tf.concat([column, value.indices[:, 1:]], 1))
      total = tf.cast(sites[0].rows.total, tf.int64)
      shape = tf.concat([total[None], values[0].dense_shape[1:]], 0)
      return tf.SparseTensor(
        gather(indices), gather(v.values for v in values), shape
      )
    return gather(values)

  # What the step gets.

  def _exchange(self) -> exchange_lib.Exchange:
    """Returns how the replicas of the step meet."""
    return self._extended.step_exchange()

  def _counts_of(self, leaves) -> tf.Tensor | None:
    """Returns the number of rows of each replica, int32."""
    return self._extended.counts_of(leaves)

  def _sites(self, leaves):
    home = self._extended.home_device
    sites = self._extended.sites_of(leaves, self._counts_of(leaves))
    if home is not None:
      sites.append(site_lib.Site(home, sites[0].rows, is_home=True))
    return sites

  def _arguments(self, graph, leaves, specs, sites, is_whole):
    """Returns the graph's inputs: tensors, their values at sites, and their kinds."""
    inputs, arguments, values = [], [], []
    placeholders = iter(graph.inputs)

    def add(built, kind, resource=None):
      inputs.append(next(placeholders))
      arguments.append(built)
      dims = None if resource is None else ()
      values.append(kinds.Value(kind, dims, resource=resource))

    replicas = [s for s in sites if s.replica is not None]
    for leaf, spec in zip(leaves, specs, strict=True):
      if spec is None:
        continue
      if is_whole or not isinstance(spec, tf.TensorSpec):
        whole = self._whole(leaf, sites)
        for part in tf.nest.flatten(whole, expand_composites=True):
          add(dict.fromkeys(sites, part), kinds.WHOLE)
      elif spec.shape.rank or isinstance(leaf, tf.distribute.DistributedValues):
        add({s: _own_rows(s, leaf) for s in replicas}, kinds.Split(0))
      else:
        add(dict.fromkeys(sites, leaf), kinds.WHOLE)
    for external, _ in graph.captures:
      built = dict.fromkeys(sites, external)
      resource = _Resource() if external.dtype == tf.resource else None
      variable = self._extended.by_handle.get(id(external))
      if variable is not None:
        is_sum = variable_copies.is_sum(variable)
        if is_sum and self._extended.holds_sums_whole:
          variable.hold_whole()
          is_sum = False
        # A metric's variable passes unknown attributes on to its reduced value.
        is_single = getattr(type(variable), 'is_central', False)
        shard = vars(variable).get('shard')
        resource = _Resource(variable, shard, is_sum, is_single)
        for site in sites:
          copy = 0 if is_single else site.replica or 0
          built[site] = variable.values[copy].handle
      add(built, kinds.WHOLE, resource)
    return inputs, arguments, values


def spec_of(leaf):
  """Returns the type of a part of a batch with any number of rows, or None.

  `leaf` may also be the type for a known number of rows.
  """
  spec = leaf
  if isinstance(leaf, tf.distribute.DistributedValues):
    spec = leaf.values[0]
  if tf.is_tensor(spec) or isinstance(spec, np.ndarray):
    spec = tf.type_spec_from_value(spec)
  if not isinstance(spec, tf.TypeSpec):
    return None
  return _tf_internal.with_any_rows(spec)


def _read(value):
  is_variable = isinstance(value, tf.Variable | keras.Variable)
  return tf.convert_to_tensor(value) if is_variable else value


def _own_rows(site, leaf):
  """Returns a replica's rows, or a row that stands in if it has none."""
  with tf.device(site.device):
    if not isinstance(leaf, tf.distribute.DistributedValues):
      return site.rows_of(leaf, kinds.Split(0))
    tensor = _checked(site, leaf.values[site.replica])
    if site.rows.real is None:
      return tensor
    return host_input.one_row_if_empty(tensor)


def _checked(site, tensor):
  """Returns the tensor, after checking that it has the batch's number of rows.

  Raises:
    UnsupportedOptionError: if it has another number.
  """
  if tensor.shape.rank == 0:
    raise errors.UnsupportedOptionError(
      'a component that is one number',
      'components with a row for each row of the batch',
      'repeat it for each row: tf.fill([batch_size], value)',
    )
  rows = site.rows.count if site.rows.real is None else site.rows.real
  known = tf.get_static_value(rows)
  if known is not None and tensor.shape.rank and tensor.shape[0] is not None:
    if tensor.shape[0] == known:
      return tensor
    raise errors.UnsupportedOptionError(
      f'a component with {tensor.shape[0]} rows in a batch of which this '
      f'replica has {known}',
      'components with a row for each row of the batch',
      'repeat or drop what belongs to no row',
    )
  with tf.device('CPU:0'):
    check = tf.debugging.assert_equal(
      tf.shape(tensor)[0],
      rows,
      'A component of a batch has another number of rows than the first. Under '
      'a strategy all components must have a row for each row of the batch.',
    )
  with tf.control_dependencies([check]):
    return tf.identity(tensor)

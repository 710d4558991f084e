"""Steps of models that give the same bits for any number of replicas.

The global batch is cut into a fixed number of virtual shards. Each shard is a
site of the planned program (see `spmd`), so its computation does not depend on
the replica that runs it. Each replica runs its own shards. Operations without
rows, such as an optimizer's update, run once per replica. `ExactExchange` adds
the values of shards.

TensorFlow's arithmetic optimizer rounds differently if a graph has a different
number of shards, so it is turned off for the process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_strategies import (
  _keras_internal,
  _tf_internal,
  errors,
  option_checks,
)
from tf_strategies.spmd import program as program_lib
from tf_strategies.spmd import site as site_lib
from tf_strategies.strategies.mirrored import (
  exact_sums,
  extended,
  host_input,
  whole_batch,
)

# The number of shards for `reproducible=True`.
DEFAULT_SHARDS = 8


def check(reproducible: object) -> int:
  """Returns the number of shards for the option, or 0 for none.

  Raises:
    UnsupportedOptionError: if it is neither a bool nor a valid number.
  """
  if not option_checks.is_int(reproducible):
    option_checks.check_bool(
      'reproducible',
      reproducible,
      'write reproducible=True, or the number of virtual shards',
    )
    return DEFAULT_SHARDS if reproducible else 0
  option_checks.check_int('reproducible', reproducible, 1, exact_sums.MAX_TERMS)
  return int(reproducible)


def extended_class(base: type, reproducible: object) -> type:
  """Returns `base`, an `ExactMirroredExtended`, adapted to the option.

  Raises:
    UnsupportedOptionError: see `check`.
  """
  num_shards = check(reproducible)
  return _sharded(base, num_shards) if num_shards else base


def check_determinism(devices: Sequence[str], num_shards: int) -> None:
  """Raises for GPUs, on which TensorFlow adds in the order of arrival.

  Raises:
    UnsupportedOptionError: if a device is a GPU and op determinism is not enabled.
  """
  types = [tf.DeviceSpec.from_string(d).device_type for d in devices]
  if 'GPU' in types and not _tf_internal.is_op_determinism_enabled():
    raise errors.UnsupportedOptionError(
      f'reproducible={num_shards} on {devices[types.index("GPU")]!r}',
      'operations that give the same bits in each run',
      'call tf.config.experimental.enable_op_determinism() before',
    )


@functools.cache
def _sharded(base, num_shards):
  name = f'Sharded{base.__name__}'
  return type(name, (_Sharded, base), {'num_shards': num_shards})


class _Step(whole_batch.WholeStep):
  """Builds a model's step, if all of it is reproducible."""

  def __init__(self, extended, kind: str, compiles: bool = False):
    # XLA fuses, and therefore rounds, depending on its whole program. The
    # program depends on the number of shards and workers.
    if compiles:
      raise errors.UnsupportedOptionError(
        'jit_compile=True with reproducible',
        'steps that XLA does not compile',
        'write compile(..., jit_compile=False), or leave out reproducible. '
        'XLA rounds by what else it compiles',
      )
    super().__init__(extended, kind)

  def _plan(self, *args, **kwargs):
    planned = super()._plan(*args, **kwargs)
    _, num_workers = self._extended.place()
    _check_random(planned.program, are_elastic=not isinstance(num_workers, int))
    return planned


def _check_random(program: program_lib.Program, are_elastic: bool) -> None:
  """Raises if another run, or another worker, would draw other random numbers.

  Raises:
    UnsupportedOptionError: if the random operation has no seed, or if workers come and
      go, because a worker that joins would start from the beginning.
  """
  fix = (
    'draw them by keras.random, with a keras.random.SeedGenerator(seed) in the '
    'model, or by a tf.random.Generator that was made in the scope'
  )
  for node in program.nodes:
    for body in node.bodies.values():
      _check_random(body, are_elastic)
    if not node.is_stateful or not {'seed', 'seed2'} <= node.attrs.keys():
      continue
    what = f'{node.type} {node.name!r} in a step with reproducible'
    if not any(node.attrs[name].i for name in ('seed', 'seed2')):
      raise errors.UnsupportedOptionError(
        f'{what} without a seed',
        'random numbers that are the same in every run',
        f'call keras.utils.set_random_seed(seed) before, or {fix}',
      )
    if are_elastic:
      raise errors.UnsupportedOptionError(
        f'{what} under tfs.elastic.run, which counts what its process has '
        'drawn',
        'random numbers that a restarted worker draws again',
        fix,
      )


class _Sharded:
  """Mixin for an `ExactMirroredExtended` that cuts the steps of models into shards."""

  num_shards: int
  splits_steps = True
  compiles_by_default = False
  _step_class = _Step
  # A part of a sum, such as a metric, would be a sum over some shards.
  holds_sums_whole = True
  local_worker = None
  no_local_steps = (
    'a strategy without reproducible',
    'leave out reproducible, or LocalSteps. Workers that train apart compute on '
    'batches that depend on their number',
  )

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    most = len(self.worker_devices) * self.most_workers
    if most > self.num_shards:
      raise errors.UnsupportedOptionError(
        f'reproducible={self.num_shards} with {most} replicas',
        'at least one virtual shard for each replica',
        f'write reproducible={1 << (most - 1).bit_length()} for all runs that '
        'are to be equal, or use fewer replicas',
      )
    check_determinism(self.worker_devices, self.num_shards)
    tf.config.optimizer.set_experimental_options(
      {'arithmetic_optimization': False}
    )

  def exchange(self, sites=()):
    """See base class."""
    shards = [s for s in sites if s.replica is not None]
    return exact_sums.ExactExchange(super().exchange(), shards)

  def sites_of(self, leaves):
    """Returns a site for each shard that a replica may have; see base class.

    The first of a replica's sites has its state. If workers come and go, a
    replica has a site for each shard, with a padding row if the shard belongs
    to another replica.
    """
    if any(isinstance(t, tf.distribute.DistributedValues) for t in leaves):
      raise errors.UnsupportedOptionError(
        'a batch that was distributed over replicas before it came to the '
        'model, from a function or by the auto-shard policy FILE or OFF',
        'batches of which every worker has all rows, with reproducible',
        'pass arrays, or the tf.data.Dataset itself, to the model',
      )
    rank, num_workers = self.place()
    count = len(self.worker_devices)
    sites = []
    with tf.device('CPU:0'):
      total = tf.cast(extended.rows_of_plain(leaves), tf.int32)
      for replica, device in enumerate(self.worker_devices):
        first, own = host_input.share(
          self.num_shards, rank * count + replica, num_workers * count
        )
        is_first = replica == 0
        main = None
        for i in range(own if isinstance(own, int) else self.num_shards):
          start, size = host_input.share(total, first + i, self.num_shards)
          size = tf.where(i < own, size, 0)
          site = site_lib.Site(
            device,
            site_lib.rows_or_stand_in(size, start, total),
            replica,
            is_chief=is_first and not main and self.does_what_is_done_once,
            is_home=is_first and not main and self.home_device is None,
            main=main,
            adds_in_order=True,
          )
          main = main or site
          sites.append(site)
    return sites

  def _call_for_each_replica(self, fn, args, kwargs):
    step = _keras_internal.step_of(_tf_internal.unwrap(fn))
    if step is None and not whole_batch.is_active():
      raise errors.UnsupportedOptionError(
        'strategy.run in a loop of your own',
        "steps of Keras's models with reproducible",
        'train with model.fit or model.train_on_batch (write the step as '
        "the model's train_step), or leave out reproducible",
      )
    return super()._call_for_each_replica(fn, args, kwargs)

  def _experimental_distribute_dataset(self, dataset, options):
    is_plain = isinstance(dataset, tf.data.Dataset) and options is None
    if (
      is_plain
      and _keras_internal.is_for_model()
      and not host_input.is_distributed(dataset)
    ):
      return self.whole_batches(dataset)
    return super()._experimental_distribute_dataset(dataset, options)


def surroundings() -> dict[str, object]:
  """Returns the settings that must be equal in all processes, by name.

  TensorFlow's kernels split some sums by the number of threads.
  """
  threads = tf.config.threading.get_intra_op_parallelism_threads()
  if not threads:
    threads = len(os.sched_getaffinity(0))
  return {
    'TensorFlow': tf.__version__,
    'Keras': keras.__version__,
    'threads of an operation': threads,
  }

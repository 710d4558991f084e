"""Elastic training: continues when workers join or leave.

`run` calls a training function, which builds, compiles and fits a model as an ordinary
script does. When a worker dies, `job.fit` continues with the workers that are left, in
the step that the death interrupted. A new worker joins between two steps. In a custom
loop, the function is called again instead, with the state in memory. The process stays
the same, and nothing is read from disk.

  def train(job):
    with job.strategy.scope():
      model = build_model()
      model.compile('adam', 'mse')
    job.restore(model)
    job.fit(model, make_batches, epochs=3, steps_per_epoch=100)
    return model

  model = tfs.elastic.run(train)

Sources: Horovod Elastic and TorchElastic (rendezvous with a minimum and a maximum,
state in memory, the training function called again) and TorchFT (recovery for each
step). There is no driver process and no coordinator.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from tf_strategies import cluster as cluster_lib
from tf_strategies import option_checks, process_group
from tf_strategies.cluster import config as config_lib
from tf_strategies.cluster import launcher_note
from tf_strategies.fault_tolerance import elastic_job, elastic_options
from tf_strategies.strategies.multi_worker import elastic as elastic_strategy
from tf_strategies.strategies.multi_worker.options import RingOptions
from tf_strategies.strategies.multi_worker.ring_strategy import (
  MultiWorkerRingStrategy,
)

ElasticOptions = elastic_options.ElasticOptions
Job = elastic_job.Job

__all__ = ['ElasticOptions', 'Job', 'run']

_Result = TypeVar('_Result')


def __dir__() -> list[str]:
  return __all__


def run(
  train_fn: Callable[[Job], _Result],
  options: ElasticOptions | None = None,
  cluster: cluster_lib.ClusterConfig | None = None,
  ring: RingOptions | None = None,
  devices: Sequence[str] | None = None,
) -> _Result:
  """Calls `train_fn(job)` until it returns, and returns its result.

  A worker that the launcher restarts does not train alone. It waits for others, which
  still train or were restarted too.

  Args:
    train_fn: builds a model in `job.strategy.scope()`, calls `job.restore` and
      trains. It is called again if the training cannot continue in the middle.
    options: the number of workers, and what ends the job.
    cluster: all workers that may join. None reads TF_CONFIG; without TF_CONFIG this
      process is alone.
    ring: options of the communication; its `link` must be 'tcp'.
    devices: devices of this worker, as for `MultiWorkerRingStrategy`.

  Raises:
    RendezvousError: too few workers have joined by the deadline.
    JobFinishedError: the training had ended before this worker joined.
    WorkerUnavailableError: more than `max_failures` consecutive failures without
      a step in between.
    UnsupportedOptionError: a wrong argument, or link='mpi'.
    Exception: any error of `train_fn`; the other workers continue.
  """
  options = ElasticOptions() if options is None else options
  ring = RingOptions() if ring is None else ring
  option_checks.check_function(
    'train_fn', train_fn, 'pass the function itself: tfs.elastic.run(train)'
  )
  option_checks.check_type(
    'options',
    options,
    ElasticOptions,
    'tfs.ElasticOptions',
    'write tfs.ElasticOptions(min_workers=1)',
  )
  option_checks.check_type(
    'ring', ring, RingOptions, 'tfs.RingOptions', 'write tfs.RingOptions()'
  )
  option_checks.check(
    ring.link != 'mpi',
    f'link={ring.link!r}',
    "link='tcp' for elastic training",
    "write RingOptions(link='tcp'), or train without tfs.elastic",
  )
  cluster = config_lib.given_or_from_env(cluster)
  rank, addresses = MultiWorkerRingStrategy.place_in(cluster)
  group_options = options.of_group(
    ring.group or process_group.GroupOptions.from_env()
  )
  rendezvous = process_group.Rendezvous(
    dict(enumerate(addresses)), rank, group_options
  )
  capacity = min(options.max_workers or len(addresses), len(addresses))
  job = elastic_job.Job(options, rendezvous, capacity)
  # From now on the launcher ends no task because another one failed.
  launcher_note.say(launcher_note.ELASTIC)
  try:
    result = job.run(
      train_fn,
      lambda members: elastic_strategy.ElasticRingStrategy(
        members, ring, devices
      ),
    )
    # The program may still have to write its results.
    launcher_note.say(launcher_note.TRAINED)
    return result
  finally:
    rendezvous.close()

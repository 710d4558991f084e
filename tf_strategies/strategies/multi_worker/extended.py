"""Extends the mirrored implementation to several workers.

Each worker is a process that mirrors variables on its devices. Values cross workers
through a `Communicator`. Everything else is `ExactMirroredExtended`, which sees only
this worker's replicas.
"""

import itertools
import operator

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.strategies import communicator as communicator_lib
from tf_strategies.strategies.mirrored import extended as mirrored_extended
from tf_strategies.strategies.multi_worker import input as input_lib
from tf_strategies.strategies.multi_worker import local_steps


class MultiWorkerExtended(
  local_steps.TrainsApart, mirrored_extended.ExactMirroredExtended
):
  """Mirrored replicas on this worker's devices, in step with other workers.

  `cross_device_ops` is the op between these devices, and `communicator` the link to
  the other workers.
  """

  def __init__(
    self,
    container_strategy,
    devices,
    cross_device_ops,
    communicator: communicator_lib.Communicator,
  ):
    super().__init__(container_strategy, devices, communicator)
    self.local_ops = cross_device_ops
    workers_lib.note_joined()
    self.datasets = itertools.count()  # Their numbers.
    self.communicator = communicator
    self._initializes_eagerly = communicator.initializes_eagerly

  # Numbers of workers and replicas. A replica's number is rank * local + local
  # id.

  @property
  def _num_replicas_in_sync(self):
    return len(self._devices) * self.communicator.world_size

  @property
  def _first_replica(self):
    return self.communicator.rank * len(self._devices)

  def _get_replica_id_in_sync_group(self, replica_id):
    return self._first_replica + replica_id

  def _get_local_replica_id(self, replica_id_in_sync_group):
    return replica_id_in_sync_group - self._first_replica

  def _in_multi_worker_mode(self):
    # KerasTuner then gives each worker its own directory.
    return not self.is_one_device

  # KerasTuner and other clients read these attributes of TensorFlow's extended.
  # In an elastic job they change with the workers.

  @property
  def _cluster_spec(self):
    # TensorFlow has None if no cluster is given.
    spec = self._cluster_resolver.cluster_spec()
    return spec if spec.jobs else None

  _task_type = property(operator.attrgetter('_cluster_resolver.task_type'))
  _task_id = property(operator.attrgetter('_cluster_resolver.task_id'))
  _id_in_cluster = property(operator.attrgetter('communicator.rank'))
  _num_workers = property(operator.attrgetter('communicator.world_size'))

  @property
  def experimental_between_graph(self):
    """Returns whether every worker runs the program: always."""
    return True

  @property
  def should_checkpoint(self):
    """Returns whether this worker writes checkpoints: the chief does."""
    return self.communicator.rank == 0

  # The chief also writes summaries, and does what must be done once.
  should_save_summary = _is_chief = does_what_is_done_once = should_checkpoint

  has_other_workers = True
  most_workers = property(operator.attrgetter('communicator.capacity'))

  # Where code runs.

  def _share_rows(self, rows):
    """Returns the rows of every replica of every worker, by replica id."""
    before = self._first_replica
    after = self._num_replicas_in_sync - before - len(self._devices)
    with tf.device('CPU:0'):
      # The number of replicas is known, so a sum is enough.
      return self.communicator.sum(tf.pad(rows, [[before, after]]), 'rows')

  def sums(self):
    """See base class. Workers collect garbage at different times."""
    if self.holds_sums_whole or not self._sums:
      return super().sums()
    sums = [reference() for reference in self._sums]
    exist = tf.cast([v is not None for v in sums], tf.int32)
    counts = self.communicator.sum(exist, 'metric').numpy()
    size = self.communicator.world_size
    return [v for v, count in zip(sums, counts, strict=True) if count == size]

  def total_of(self, variable):
    """See base class."""
    mine = super().total_of(variable)
    return self.communicator.sum(mine, 'metric')

  def step_exchange(self):
    """See base class."""
    return self.communicator

  def _get_cross_device_ops(self, value):
    if self._num_replicas_in_sync > len(self._devices):
      # On GPUs, TensorFlow would use collectives of this worker's devices only.
      communicator_lib.check_not_compiled('all_reduce')
    return super()._get_cross_device_ops(value)

  # How variables are created, and what feeds the replicas.

  def _shares_first_value(self, options) -> bool:
    """Returns whether a variable starts from the chief's value."""
    del options
    return True

  def _get_variable_creator_initial_value(
    self, replica_id, device, primary_var, **kwargs
  ):
    if replica_id > 0 or not self._shares_first_value(kwargs):
      return super()._get_variable_creator_initial_value(
        replica_id, device, primary_var, **kwargs
      )

    def initial_value():
      value = kwargs['initial_value']
      value = value() if callable(value) else value
      value = _tf_internal.unwrap_checkpoint_value(value)
      tensor = tf.convert_to_tensor(value, dtype=kwargs.get('dtype'))
      # Without the variable's name, in which Keras counts the models of a process.
      return self.communicator.from_chief(tensor, 'initial_value')

    return initial_value

  def _experimental_distribute_dataset(self, dataset, options):
    return input_lib.distribute(self, dataset, options)

  def _distribute_datasets_from_function(self, dataset_fn, options):
    return input_lib.distribute_from_function(self, dataset_fn, options)

  def _experimental_distribute_values_from_function(self, value_fn):
    values = []
    for place, device in zip(self.places, self._devices, strict=True):
      context = tf.distribute.experimental.ValueContext(
        place, self._num_replicas_in_sync
      )
      with tf.device(device):
        values.append(value_fn(context))
    return _tf_internal.regroup(tuple(values), always_wrap=True)

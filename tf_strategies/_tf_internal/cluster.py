"""The process's connection to a cluster, and its eager operations there."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import tensorflow as tf

from tf_strategies import _requirements, errors
from tf_strategies._tf_internal.loading import change, load

_new_executor = load(
  'eager.executor.new_executor', "keeps threads' failures apart"
)
_executor_scope = load(
  'eager.context.executor_scope', 'runs ops by an executor of our own'
)
eager_context = load(
  'eager.context.context', 'connects again to tasks that were restarted'
)


_list_devices = load(
  'pywrap_tfe.TFE_ContextListDevices', 'tells tasks from those before them'
)
_count = load(
  'client.pywrap_tf_session.TF_DeviceListCount', 'counts devices of tasks'
)
_name = load('client.pywrap_tf_session.TF_DeviceListName', 'names devices')
_incarnation = load(
  'client.pywrap_tf_session.TF_DeviceListIncarnation',
  'tells tasks from those before them',
)


def connected_cluster():
  """Returns the `ServerDef` of the cluster that this process is connected to,
  if any.
  """
  return eager_context().get_server_def()


def is_reachable(dataset: tf.data.Dataset) -> bool:
  """Returns whether this process still has the device that the data set was made on.

  Connecting to a cluster gives the process's own devices another job.
  """
  device = dataset._variant_tensor.device or ''  # None or '' in a graph.
  is_from_before = tf.DeviceSpec.from_string(device).job == 'localhost'
  return not is_from_before or connected_cluster() is None


def connect_again(anew: Collection[tuple[str, int]] = ()) -> None:
  """Connects to tasks that were restarted. Call it when every task answers.

  It first disconnects the tasks in `anew`. TensorFlow asks a task for its
  devices before it lets the task join. If another process replaces the task in
  between, TensorFlow keeps the devices of the old process.
  """
  context = eager_context()
  server_def = context.get_server_def()
  if anew:
    # No other task may join while these are disconnected. Servers would get a
    # cluster without them. They would not notice the return, because servers do
    # not see each other.
    context.update_server_def(server_def)
    others = type(server_def)()
    others.CopyFrom(server_def)
    del others.cluster.job[:]
    for job in server_def.cluster.job:
      tasks = {i: a for i, a in job.tasks.items() if (job.name, i) not in anew}
      if tasks:
        others.cluster.job.add(name=job.name, tasks=tasks)
    try:
      context.update_server_def(others)
    finally:
      context._server_def = server_def
  context.update_server_def(server_def)


def incarnations() -> dict[tuple[str, int], int]:
  """Returns a number that identifies the process of each connected task."""
  devices = _list_devices(eager_context()._handle)
  found = {}
  for i in range(_count(devices)):
    spec = tf.DeviceSpec.from_string(_name(devices, i))
    if spec.device_type == 'CPU':
      found[spec.job, spec.task] = _incarnation(devices, i)
  return found


def before_sending_functions(check: Callable[[], None]) -> None:
  """Calls `check()` before a function is sent to all tasks of the cluster.

  TensorFlow sends a traced function, then waits for all answers without a
  deadline and holds Python's lock. If a task is stopped, every thread hangs.
  """
  context = eager_context()
  for name in ('add_c_function', 'add_function_def'):
    add = getattr(type(context), name)

    def checked(definition, add=add):
      check()
      return add(context, definition)

    setattr(context, name, checked)


@contextlib.contextmanager
def without_notices():
  """Limits the log of TensorFlow's Python code to warnings and errors.

  TensorFlow logs long configurations, and warns that it ignores a TF_CONFIG
  that this package uses.
  """

  def is_warning(record):
    return record.levelno >= logging.WARNING

  loggers = tf.get_logger(), logging.getLogger('absl')
  for logger in loggers:
    logger.addFilter(is_warning)
  try:
    yield
  finally:
    for logger in loggers:
      logger.removeFilter(is_warning)


@contextlib.contextmanager
def own_executor():
  """Runs the thread's eager ops separately from those of other threads.

  After an error, an executor raises the error again in its next operation.
  """
  executor = _new_executor(enable_async=False)
  with _executor_scope(executor):
    try:
      yield
    finally:
      executor.clear_error()


def on_host(*values: Any) -> list[tf.Tensor]:
  """Makes tensors of the values on this host, whatever the device of the scope is.

  TensorFlow holds Python's lock while it makes one on another task, so a task that is
  silent would stop all threads.
  """
  with tf.device(None), tf.device('/device:CPU:0'):
    return [tf.constant(v) for v in values]


@contextlib.contextmanager
def on_task(device: str, *values: Any) -> Iterator[list[tf.Tensor]]:
  """Runs eager ops on a remote device, on tensors from `on_host`."""
  with own_executor(), tf.init_scope():
    tensors = on_host(*values)
    with tf.device(device):
      yield tensors


def clear_errors() -> None:
  """Clears the error of this thread's eager ops."""
  eager_context().executor.clear_error()


def _needs_service(init: Callable) -> Callable:
  """Returns the handler's `__init__` with a check for the service that it needs.

  Without the service, its thread ends with a log message and watches no worker.
  """

  def checked(self, cluster_resolver, *args, **kwargs):
    has_cluster = cluster_resolver and cluster_resolver.cluster_spec().jobs
    if has_cluster and eager_context().coordination_service is None:
      raise errors.UnsupportedOptionError(
        'PreemptionCheckpointHandler without it',
        "TensorFlow's coordination service",
        "use tfs.Run, or the strategy 'multi_worker_collective'. Model "
        'Garden makes no handler with '
        'trainer.preemption_on_demand_checkpoint=False',
      )
    init(self, cluster_resolver, *args, **kwargs)

  return checked


_WHY = "raises an error where the handler's thread would fail"
_requirements.method(
  load('eager.context.Context', _WHY), 'coordination_service', _WHY
)
change(
  tf.distribute.experimental.PreemptionCheckpointHandler,
  '__init__(cluster_resolver, checkpoint_or_checkpoint_manager, '
  'checkpoint_dir, termination_config)',
  _needs_service,
  _WHY,
)

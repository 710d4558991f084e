"""Variables on servers, simulated by logical CPUs of this process."""

from unittest import mock

import tensorflow as tf

from tests import tf_case, virtual_devices
from tf_strategies.collectives import schedule
from tf_strategies.strategies.parameter_server import (
  partitioned,
  traced_step,
  variables,
)

virtual_devices.configure()


def device(server: int) -> str:
  """Returns the logical CPU that stands for a server."""
  return f'/job:localhost/replica:0/task:0/device:CPU:{1 + server}'


class LocalServersTestCase(tf_case.TestCase):
  """Places variables of servers in this process."""

  def setUp(self):
    super().setUp()
    for patch in (
      mock.patch.object(variables, 'server_device', device),
      mock.patch.object(traced_step, 'COORDINATOR', '/device:CPU:0'),
    ):
      self.enter_context(patch)


def scope():
  """Returns a scope that creates all variables on server 0."""

  def create(_, initial_value, trainable=None, name=None, **options):
    value = initial_value() if callable(initial_value) else initial_value
    if value is None:  # When a SavedModel is loaded.
      value = tf.zeros(options['shape'], options['dtype'])
    return variable(0, value, trainable=trainable, name=name)

  return tf.variable_creator_scope(create)


def _call(action=lambda: None):
  return action()


def variable(server: int, value, drained=_call, on_write=_call, **options):
  """Returns a variable on a server."""
  return variables.ServerVariable(
    server=server,
    drained=drained,
    on_write=on_write,
    initial_value=tf.convert_to_tensor(value),
    **options,
  )


def partitioned_variable(value, parts: int, **options):
  """Returns a variable in parts, each on its own server."""
  value = tf.convert_to_tensor(value)
  sizes = schedule.chunk_sizes(value.shape[0], parts)
  return partitioned.PartitionedVariable(
    [
      variable(i, rows, trainable=False)
      for i, rows in enumerate(tf.split(value, sizes))
    ],
    'whole',
    **options,
  )

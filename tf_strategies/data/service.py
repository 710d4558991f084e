"""Batches from a tf.data service: other processes read and transform.

  dispatcher = tf.data.experimental.service.DispatchServer()
  worker = tf.data.experimental.service.WorkerServer(
    tf.data.experimental.service.WorkerConfig(
      dispatcher_address=dispatcher.target.split('://')[1]))
  options = tfs.data.PipelineOptions(
    global_batch_size=256, deterministic=False, service=dispatcher.target)

TensorFlow's client tries for an hour to reach a missing dispatcher. Here a
dispatcher with at least one worker must answer before a deadline.

Example:

  >>> from tf_strategies.data import service
  >>> service.check('grpc://127.0.0.1:9', timeout=0.2)
  Traceback (most recent call last):
    ...
  tf_strategies.errors.WorkerUnavailableError: service='grpc://127.0.0.1:9': no tf.data dispatcher answered within 0.2 s. Fix: start a tf.data.experimental.service.DispatchServer there, or correct the address
"""

from __future__ import annotations

import socket
import time

import tensorflow as tf

from tf_strategies import errors

try:  # TensorFlow brings it.
  import grpc
except ImportError:  # Then all we can see is whether anybody listens.
  grpc = None

# Asks for the workers; the request is empty, and so is the answer without any.
_GET_WORKERS = '/tensorflow.data.DispatcherService/GetWorkers'
_POLL_SECONDS = 0.1


def distribute(
  dataset: tf.data.Dataset, address: str, timeout: float
) -> tf.data.Dataset:
  """Lets the workers of a service make the elements, each of them once.

  The workers share the data out as they go (`ShardingPolicy.DYNAMIC`): by files
  where a data set begins with files, by examples where it begins with these.

  Args:
    dataset: that ends; each worker runs it on its part of the source.
    address: 'grpc://host:port' of the dispatcher.
    timeout: seconds in which it must answer.

  Raises:
    WorkerUnavailableError: as `check`.
  """
  check(address, timeout)
  return dataset.apply(
    tf.data.experimental.service.distribute(
      tf.data.experimental.service.ShardingPolicy.DYNAMIC, address
    )
  )


def check(address: str, timeout: float) -> None:
  """Waits until a dispatcher answers that has a worker.

  Args:
    address: 'grpc://host:port'.
    timeout: seconds to wait at most.

  Raises:
    WorkerUnavailableError: nobody answers, or no worker has registered.
  """
  deadline = time.monotonic() + timeout
  host_and_port = address.removeprefix('grpc://')
  if grpc is None:
    return _check_connection(address, host_and_port, timeout)
  with grpc.insecure_channel(host_and_port) as channel:
    get_workers = channel.unary_unary(_GET_WORKERS)
    has_answered = False
    while True:
      left = deadline - time.monotonic()
      if left <= 0:
        break
      try:
        if get_workers(b'', timeout=left, wait_for_ready=True):
          return None
        has_answered = True
      except grpc.RpcError as e:
        if e.code() == grpc.StatusCode.UNIMPLEMENTED:
          break  # Some other service: waiting does not make it ours.
      time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
  if has_answered:
    _raise_unavailable(
      address,
      f'no worker registered with the dispatcher within {timeout:g} s. Fix: '
      'start a tf.data.experimental.service.WorkerServer with the '
      'dispatcher_address of this service',
    )
  _raise_nobody(address, timeout)


def _check_connection(address, host_and_port, timeout):
  host, _, port = host_and_port.rpartition(':')
  try:
    socket.create_connection((host, int(port)), timeout).close()
  except OSError:
    _raise_nobody(address, timeout)


def _raise_nobody(address: str, timeout: float):
  _raise_unavailable(
    address,
    f'no tf.data dispatcher answered within {timeout:g} s. Fix: start a '
    'tf.data.experimental.service.DispatchServer there, or correct the address',
  )


def _raise_unavailable(address: str, what: str):
  error = errors.WorkerUnavailableError(f'service={address!r}: {what}')
  error.address = address.removeprefix('grpc://')
  raise error

"""Batches from a tf.data service: other processes read and transform.

  dispatcher = tf.data.experimental.service.DispatchServer()
  worker = tf.data.experimental.service.WorkerServer(
    tf.data.experimental.service.WorkerConfig(
      dispatcher_address=dispatcher.target.split('://')[1]))
  options = tfs.data.PipelineOptions(
    global_batch_size=256, deterministic=False, service=dispatcher.target)

TensorFlow's client tries for an hour to reach a missing dispatcher. Here a
dispatcher with at least one worker must answer before a deadline.
"""

from __future__ import annotations

import time

import grpc
import tensorflow as tf

from tf_strategies import errors

# Asks for the workers; the request is empty, and so is the answer without any.
_GET_WORKERS = '/tensorflow.data.DispatcherService/GetWorkers'
_POLL_SECONDS = 0.1
# What may be missing, and what helps.
_NOBODY = (
  'tf.data dispatcher answered',
  'start a tf.data.experimental.service.DispatchServer there, or correct the '
  'address',
)
_NO_WORKER = (
  'worker registered with the dispatcher',
  'start a tf.data.experimental.service.WorkerServer with the '
  'dispatcher_address of this service',
)


def distribute(
  dataset: tf.data.Dataset, address: str, timeout: float
) -> tf.data.Dataset:
  """Lets the workers of a service make the elements, each of them once.

  The workers share the data out as they go (`ShardingPolicy.DYNAMIC`): by files
  where a data set begins with files, by examples where it begins with these.
  """
  check(address, timeout)
  return dataset.apply(
    tf.data.experimental.service.distribute(
      tf.data.experimental.service.ShardingPolicy.DYNAMIC, address
    )
  )


def check(address: str, timeout: float) -> None:
  """Waits until a dispatcher answers that has a worker, or raises an error."""
  host_and_port = address.removeprefix('grpc://')
  problem = _get_workers(host_and_port, timeout)
  if problem:
    error = errors.WorkerUnavailableError(
      f'service={address!r}: no {problem[0]} within {timeout:g} s. Fix: '
      f'{problem[1]}'
    )
    error.address = host_and_port
    raise error


def _get_workers(host_and_port, timeout) -> tuple[str, str] | None:
  """Returns what was missing until the deadline, and what helps."""
  deadline = time.monotonic() + timeout
  problem = _NOBODY
  with grpc.insecure_channel(host_and_port) as channel:
    get_workers = channel.unary_unary(_GET_WORKERS)
    while (left := deadline - time.monotonic()) > 0:
      try:
        if get_workers(b'', timeout=left, wait_for_ready=True):
          return None
        problem = _NO_WORKER
      except grpc.RpcError as e:
        if e.code() == grpc.StatusCode.UNIMPLEMENTED:
          break  # Some other service: waiting does not make it ours.
      time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
  return problem

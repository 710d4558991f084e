"""A real tf.data service: each example once, and no waiting without an end."""

import dataclasses
import socket
import time

import pytest
import tensorflow as tf
from absl.testing import parameterized

from examples import datasets
from tests import tiers
from tests.data import formula
from tf_strategies import data as data_lib
from tf_strategies import errors

_service = tf.data.experimental.service
_N = 37


class ServiceTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dispatcher = _service.DispatchServer()
    self.workers = []

  def start_workers(self, count):
    address = self.dispatcher.target.removeprefix('grpc://')
    for _ in range(count):
      self.workers.append(
        _service.WorkerServer(
          _service.WorkerConfig(address, heartbeat_interval_ms=50)
        )
      )

  def options(self, **changes):
    return data_lib.PipelineOptions(
      **(
        {
          'global_batch_size': 4,
          'deterministic': False,
          'service': self.dispatcher.target,
        }
        | changes
      )
    )

  def order(self, dataset):
    return [int(y) for _, batch in dataset for y in batch]

  def labels(self, dataset):
    return sorted(self.order(dataset))

  def make_files(self, options):
    directory = self.create_tempdir().full_path
    datasets.write_tfrecords(formula.numbered(_N, 5), directory, 5)
    return data_lib.make_dataset(
      datasets.tfrecords(directory, 'train'), options, training=True
    )

  def make_arrays(self, options):
    return data_lib.make_dataset(
      formula.arrays(_N),
      options,
      training=True,
      augment_fn=lambda x, y, seed: (x, y + 0 * seed[0]),
    )

  def make_seeds(self, options):
    return data_lib.make_dataset(
      formula.arrays(_N),
      dataclasses.replace(options, shuffle_buffer=0),
      training=True,
      augment_fn=lambda x, y, seed: (x, tf.fill(tf.shape(y), seed[0])),
    )

  @tiers.parameters('make_files', tiers.soak('make_arrays'))
  def test_each_example_once_an_epoch(self, make):
    self.start_workers(2)
    dataset = getattr(self, make)(self.options())
    for _ in range(2):
      self.assertEqual(self.labels(dataset), list(range(_N)))

  @tiers.parameters(
    tiers.full('make_files'), tiers.soak('make_arrays'), 'make_seeds'
  )
  def test_each_epoch_has_an_order_and_seeds_of_its_own(self, make):
    # Each epoch is a new job, whose random numbers begin anew.
    self.start_workers(1)
    tf.random.set_seed(7)
    self.addCleanup(tf.random.set_seed, None)
    dataset = getattr(self, make)(self.options())
    orders = {tuple(self.order(dataset)) for _ in range(3)}
    self.assertLen(orders, 3)

  def test_pipelines_that_share_examples_are_refused(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'service=.*2 input pipelines that share'
    ):
      data_lib.make_dataset(
        formula.arrays(_N),
        self.options(),
        training=True,
        input_context=tf.distribute.InputContext(2, 0, 2),
      )

  @pytest.mark.full
  def test_repeats_epoch_by_epoch(self):
    self.start_workers(1)
    dataset = self.make_arrays(self.options(repeat=True))
    steps = -(-_N // 4)
    labels = self.labels(dataset.take(2 * steps))
    self.assertEqual(labels, sorted([*range(_N)] * 2))

  def test_dispatcher_without_a_worker(self):
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError, 'no worker registered.*1 s'
    ) as caught:
      self.make_arrays(self.options(service_timeout=1.0))
    self.assertEqual(
      f'grpc://{caught.exception.address}', self.dispatcher.target
    )

  def test_nobody_and_somebody_else(self):
    with socket.create_server(('127.0.0.1', 0)) as silent:
      port = silent.getsockname()[1]
      for address in (f'grpc://127.0.0.1:{port}', 'grpc://no.such.host:1'):
        began = time.monotonic()
        with self.assertRaisesRegex(
          errors.WorkerUnavailableError, f'{address}.*no tf.data dispatcher'
        ):
          self.make_arrays(self.options(service=address, service_timeout=0.5))
        self.assertLess(time.monotonic() - began, 60)


if __name__ == '__main__':
  tf.test.main()

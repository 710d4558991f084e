"""The benchmark of slow links trains, and its figures are what happened."""

import itertools
import os

import numpy as np
import pytest
from absl.testing import absltest

from benchmarks import network_namespaces, slow_link_task
from tests.benchmarks import running


class TaskTest(absltest.TestCase):
  def _path(self):
    path = os.path.join(self.create_tempdir().full_path, 'digits.npz')
    random = np.random.default_rng(3)
    labels = random.integers(0, 10, 500)
    images = random.integers(0, 50, [500, 28, 28])
    for row, label in enumerate(labels):  # Each class has a bright line.
      images[row, 2 * label] = 255
    np.savez(
      path,
      x_train=images[:400].astype(np.uint8),
      y_train=labels[:400],
      x_test=images[400:].astype(np.uint8),
      y_test=labels[400:],
    )
    return path

  def test_batches_are_whole_epochs_in_an_order_of_the_seed(self):
    path = self._path()
    batches = slow_link_task.Images(path, 40, seed=1).batches(15)
    self.assertEqual(batches.shape, (15, 40))
    self.assertEqual(sorted(batches[:10].ravel()), list(range(400)))
    again = slow_link_task.Images(path, 40, seed=1).batches(15)
    np.testing.assert_array_equal(batches, again)
    other = slow_link_task.Images(path, 40, seed=2).batches(15)
    self.assertFalse(np.array_equal(batches, other))

  def test_loss(self):
    x = np.float32([[1, 0], [0, 1]])
    weights = [np.eye(2), np.zeros(2), np.eye(2) * 3, np.zeros(2)]
    expected = np.log(1 + np.exp(-3))
    self.assertAlmostEqual(
      slow_link_task.test_loss(weights, x, np.array([0, 1])), expected, 6
    )

  def test_summary(self):
    looks = [(1, 0.5), (2, 0.05)]
    found = [
      {'seconds': [1.0, 2.0], 'looks': looks, 'sent_bytes': [8]},
      {'seconds': [3.0, 1.0], 'looks': looks, 'sent_bytes': [4]},
    ]
    result = slow_link_task.summary('peer', '1gbit', found, 0.1)
    self.assertEqual(result['mean_ms'], 2500.0)
    self.assertEqual(result['steps_to_loss'], 2)
    self.assertEqual(result['seconds_to_loss'], 5.0)
    self.assertEqual(result['kb_a_step'], 0.004)

  @pytest.mark.multi_process
  @pytest.mark.soak
  def test_two_hosts(self):
    reason = network_namespaces.missing()
    if reason is not None:
      self.skipTest(reason)
    report = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'slow_links',
      f'--data_path={self._path()}',
      '--global_batch_size=16',
      '--link_rates=1gbit',
      '--peers=none,int8',
      '--looks=2',
      '--loss=0.5',
      f'--report_json={report}',
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    running.assert_has_table(self, report)
    plain, coded = running.read_json(report)['results']
    for result in (plain, coded):
      self.assertLess(result['looks'][1][1], result['looks'][0][1])
      reached = [step for step, loss in result['looks'] if loss <= 0.5]
      self.assertEqual(result['steps_to_loss'], reached[0])
    # 4 bytes for each of the parameters, and what TCP adds.
    sizes = (28 * 28, *slow_link_task.HIDDEN, slow_link_task.CLASSES)
    parameters = sum((a + 1) * b for a, b in itertools.pairwise(sizes))
    self.assertBetween(plain['kb_a_step'] / (parameters * 4e-3), 1.0, 1.15)
    self.assertBetween(coded['kb_a_step'] / plain['kb_a_step'], 0.24, 0.3)


if __name__ == '__main__':
  absltest.main()

"""Peers take turns, and peers with wrong results are not timed."""

import itertools
import math
import os

import tensorflow as tf
from absl.testing import absltest, parameterized

from benchmarks import measure, report, training_peers
from benchmarks.parameter_server_peers import results as servers
from benchmarks.process_peers import base
from benchmarks.strategy_costs import catalogue, results
from tf_strategies import errors

LOSSES = {
  'ring_8mb': [0.5, 0.5],
  'ring_8mb_bfloat16': [0.501, 0.501],
  'collective': [0.50001, 0.50001],
  'one_device_global_batch': [0.5],
  'one_device_part': [0.7],
  'ring_local_16': [0.6, 0.6],
  # A peer with another optimizer.
  'ring_adam': [0.4, 0.4],
  'ring_adam_sharded': [0.4, 0.4],
}


class CheckLossesTest(parameterized.TestCase):
  def test_equal_losses_pass(self):
    self.assertIsNone(training_peers.check_losses(LOSSES))

  @parameterized.parameters(
    ('ring_8mb', [0.5, 0.51], 'ring_8mb: rank 1 has a loss of 0.51, not 0.5'),
    ('ring_8mb', [float('nan'), 0.5], 'ring_8mb: rank 0 has a loss of nan'),
    ('ring_local_16', [0.6, 0.6001], 'ring_local_16: rank 1'),
    ('ring_8mb_bfloat16', [0.5, 0.53], 'ring_8mb_bfloat16: rank 1'),
    ('ring_adam_sharded', [0.4, 0.5], 'rank 1 has a loss of 0.5, not 0.4'),
  )
  def test_different_loss_raises(self, peer, losses, words):
    with self.assertRaisesRegex(RuntimeError, words):
      training_peers.check_losses(LOSSES | {peer: losses})

  def test_ranks_are_compared_without_a_reference(self):
    with self.assertRaisesRegex(RuntimeError, 'ring_1mb: rank 1'):
      training_peers.check_losses({'ring_1mb': [0.5, 0.6]})


class EchoPeer(base.Peer):
  """A peer that returns its input."""

  def prepare(self):
    pass

  def barrier(self):
    pass

  def release(self):
    pass

  def call(self):
    return None

  def result(self, returned):
    return returned


def make_peer():
  addresses = tuple(f'127.0.0.1:{i + 1}' for i in range(4))
  peer = EchoPeer(base.Seat(1, addresses, 'lo', 1.0))
  peer.num_bytes = 40_000
  return peer


class CheckTest(parameterized.TestCase):
  def test_correct_sum_passes(self):
    self.assertIsNone(make_peer().check(base.expected_sum(4, 10_000)))

  @parameterized.parameters(0, 9999)
  def test_one_wrong_element_raises(self, index):
    found = base.expected_sum(4, 10_000)
    found[index] += 1
    with self.assertRaisesRegex(RuntimeError, 'EchoPeer: rank 1 of 4'):
      make_peer().check(found)


class CheckTurnTest(parameterized.TestCase):
  def test_reference_may_skip_steps_but_not_add_steps(self):
    servers.check_turn('stock', {'iterations': 17, 'loss': 1.0}, 30, 2.3)
    for count in (0, 31):
      with self.assertRaisesRegex(RuntimeError, f'stock applied {count} steps'):
        servers.check_turn('stock', {'iterations': count, 'loss': 1}, 30, 2.3)

  @parameterized.parameters(
    (29, 1.0, 'ours applied 29 steps, not 30'),
    (30, 2.3, 'ours has a loss of 2.3 after 30 steps, and 2.3 before'),
    (30, math.nan, 'ours has a loss of nan'),
  )
  def test_wrong_turn_raises(self, iterations, loss, words):
    turn = {'iterations': iterations, 'loss': loss}
    with self.assertRaisesRegex(RuntimeError, words):
      servers.check_turn('ours', turn, 30, 2.3)

  def test_different_initial_losses_raise(self):
    servers.check_initial_losses({'stock': 2.3, 'ours': 2.30001})
    for other in (2.31, math.nan):
      with self.assertRaisesRegex(RuntimeError, 'ours begins with a loss of'):
        servers.check_initial_losses({'stock': 2.3, 'ours': other})


WORKERS = catalogue.costs('multi_worker_ring')
MB = 1_000_000


def task_report(rank):
  """Returns the report of a task that trained two epochs of ten steps."""
  return {
    'is_chief': rank == 0,
    'iterations': 20,
    'steps': 20,
    'examples_per_second': 5000.0,
    'bytes_per_step': (None, None),
    'variable_bytes': {'CPU:0': 3, 'CPU:1': 4 + rank},
    'test': {'accuracy': 0.9},
    'timed_epochs': [
      {'loopback_bytes': 30 * MB},
      {'loopback_bytes': 10 * MB},
    ],
  }


class MeasuredTest(absltest.TestCase):
  def test_bytes_and_variables_are_summed_over_workers(self):
    found = results.measured(WORKERS, [task_report(0), task_report(1)])
    # Over loopback, 40 MB in 20 steps.
    self.assertIsNone(found['bytes_per_step_into_busiest'])
    self.assertEqual(found['bytes_per_step_total'], 2 * MB)
    self.assertEqual(found['variable_bytes_total'], 3 + 4 + 3 + 5)
    self.assertEqual(found['variable_bytes_most'], 5)

  def test_unknown_strategy_is_refused(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "one_device, mirrored.*strategies='ring'"
    ):
      catalogue.costs('ring')


class MeasureTest(tf.test.TestCase):
  def take_turns(self):
    called = []
    functions = {n: lambda n=n: called.append(n) for n in 'abcd'}
    measure.take_turns(functions, rounds=20, repeats=2, warmup=1)
    return [''.join(called[i : i + 12]) for i in range(0, len(called), 12)]

  def test_peers_take_turns_in_varying_order(self):
    turns = self.take_turns()
    self.assertLen(turns, 20)
    before = {}
    for turn in turns:
      self.assertCountEqual(
        [turn[i : i + 3] for i in range(0, 12, 3)], ['aaa', 'bbb', 'ccc', 'ddd']
      )
      for first, second in itertools.pairwise(turn[::3]):
        before.setdefault(second, set()).add(first)
    self.assertEqual(set(map(len, before.values())), {3})
    self.assertEqual(self.take_turns(), turns)


class ReportTest(tf.test.TestCase):
  def test_invalid_report_path_is_refused(self):
    directory = self.create_tempdir().full_path
    report.check_target('report_json', None)
    report.check_target('report_json', os.path.join(directory, 'a.json'))
    for path in (directory, os.path.join(directory, 'b', 'a.json')):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, 'report_json'):
        report.check_target('report_json', path)


if __name__ == '__main__':
  absltest.main()

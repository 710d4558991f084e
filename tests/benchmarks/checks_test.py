"""Peers whose losses differ are not timed."""

from absl.testing import absltest, parameterized

from benchmarks import training_peers

RIGHT = {
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
  def test_equal_losses(self):
    self.assertIsNone(training_peers.check_losses(RIGHT))

  @parameterized.parameters(
    ('ring_8mb', [0.5, 0.51], 'ring_8mb: rank 1 has a loss of 0.51, not 0.5'),
    ('ring_8mb', [float('nan'), 0.5], 'ring_8mb: rank 0 has a loss of nan'),
    ('ring_local_16', [0.6, 0.6001], 'ring_local_16: rank 1'),
    ('ring_8mb_bfloat16', [0.5, 0.53], 'ring_8mb_bfloat16: rank 1'),
    ('ring_adam_sharded', [0.4, 0.5], 'rank 1 has a loss of 0.5, not 0.4'),
  )
  def test_difference(self, peer, losses, words):
    with self.assertRaisesRegex(RuntimeError, words):
      training_peers.check_losses(RIGHT | {peer: losses})

  def test_without_one_device_ranks_must_agree(self):
    with self.assertRaisesRegex(RuntimeError, 'ring_1mb: rank 1'):
      training_peers.check_losses({'ring_1mb': [0.5, 0.6]})


if __name__ == '__main__':
  absltest.main()

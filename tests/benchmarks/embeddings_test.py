"""The benchmark of tables trains with every peer, and counts what travels."""

import os

import pytest
from absl.testing import absltest

from tests.benchmarks import running

_ROWS, _WIDTH, _BATCH = 500, 8, 32


@pytest.mark.multi_process
@pytest.mark.soak
class EmbeddingsTest(absltest.TestCase):
  def test_every_peer_learns_and_moves_its_rows_at_least(self):
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'embeddings',
      f'--rows={_ROWS}',
      f'--width={_WIDTH}',
      f'--batch_size={_BATCH}',
      '--optimizers=adagrad',
      '--steps=40',
      '--rounds=1',
      f'--report_json={path}',
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    running.assert_has_table(self, path)
    found = {r['peer']: r for r in running.read_json(path)['results']}
    self.assertEqual([*found], ['by_hand', 'ours', 'stock_keras'])
    for name, record in found.items():
      self.assertRegex(done.stdout, rf'adagrad .* {name} ')
      self.assertLess(record['losses'][-1], record['losses'][0])
      self.assertGreater(record['median_ms'], 0)
      # Not more than a batch of rows there and back, and not much less: few repeat.
      most = 2 * 4 * ((_BATCH + 1) * _WIDTH + 1)
      self.assertBetween(record['bound_bytes'], 0.9 * most, most)
      self.assertGreater(record['bytes_per_step'], record['bound_bytes'])
    # The whole table travels, one way, where Keras's layer reads it.
    self.assertGreater(
      found['stock_keras']['bytes_per_step'], 4 * _ROWS * _WIDTH
    )


if __name__ == '__main__':
  absltest.main()

"""The benchmark trains with every peer, and its report is complete."""

import os

import pytest
from absl.testing import absltest

from benchmarks.parameter_server_peers import catalogue
from tests.benchmarks import running

STEPS, ROUNDS, BLOCKS, ROWS = 8, 2, 2, 4


@pytest.mark.soak
class ParameterServerTest(absltest.TestCase):
  def _run(self, *flags):
    """The finished process and its report."""
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'parameter_server',
      f'--steps={STEPS}',
      f'--rounds={ROUNDS}',
      f'--blocks={BLOCKS}',
      f'--per_replica_batch_size={ROWS}',
      f'--report_json={path}',
      *flags,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    running.assert_has_table(self, path)
    return done, running.read_json(path)

  def test_all_peers(self):
    steps_per_execution = [1, 4]
    names = [peer.name for peer in catalogue.PEERS]
    done, found = self._run(
      '--models=cnn',
      '--num_workers=2',
      f'--steps_per_execution={",".join(map(str, steps_per_execution))}',
      f'--peers={",".join(names)}',
    )
    self.assertEqual(
      [case['steps_per_execution'] for case in found['results']],
      steps_per_execution,
    )
    for case in found['results']:
      self.assertEqual(case['num_variables'], 8)
      self.assertEqual(case['num_workers'], 2)
      records = {r['peer']: r for r in case['peers']}
      self.assertEqual(list(records), names)
      for record in records.values():
        self.assert_peer(record, case['loss'])
        self.assertAlmostEqual(
          record['ratio_to_stock'],
          record['steps_per_s']['median']
          / records['stock']['steps_per_s']['median'],
        )
    for name in names:
      self.assertRegex(done.stdout, rf'cnn .* {name} ')

  def assert_peer(self, record, initial_loss):
    # On the servers: of the block to warm up and of those that count.
    steps = (1 + BLOCKS) * STEPS
    self.assertEqual(record['steps_per_turn'], steps)
    if record['peer'] == 'stock':  # Workers overwrite each other's count.
      self.assertBetween(record['iterations'], steps // 4, steps)
    else:
      self.assertEqual(record['iterations'], steps)
    self.assertNotEqual(record['loss'], initial_loss)
    self.assertLen(record['samples'], ROUNDS * BLOCKS)
    rates = [STEPS / s for s in record['samples']]
    self.assertAlmostEqual(record['steps_per_s']['least'], min(rates))
    self.assertAlmostEqual(record['steps_per_s']['most'], max(rates))
    self.assertAlmostEqual(
      record['examples_per_s'], ROWS * record['steps_per_s']['median']
    )

  def test_bad_flags(self):
    for flag, words in (
      ('--peers=fed', "'fed' is none of stock"),
      ('--num_workers=0', 'integers of 1 or more'),
      ('--steps=25', 'no multiple of 10'),
    ):
      done = running.run_benchmark('parameter_server', flag)
      self.assertNotEqual(done.returncode, 0)
      self.assertIn(words, done.stdout + done.stderr)


if __name__ == '__main__':
  absltest.main()

"""What of the tasks' output the launcher shows, and how it looks."""

import pathlib

from absl.testing import absltest

from tests.launch import programs


class ShownTest(absltest.TestCase):
  def test_rank_filter_hides_lines_but_not_from_the_logs(self):
    code = """
print('from', name, flush=True)
if name == 'worker_0':
  wait_for('pid', 'worker_1')
  sys.exit(4)
time.sleep(600)
"""
    directory = pathlib.Path(self.create_tempdir().full_path)
    logs = directory / 'logs'
    flags = (
      *('--num_workers=2', '--chief', '--rank_filter=chief,worker:1'),
      *(f'--log_dir={logs}', '--grace_period=1'),
    )
    with programs.Launcher(directory, flags, code) as launcher:
      self.assertEqual(launcher.wait(), 4)
      shown = launcher.stdout().decode().splitlines()
      self.assertIn('[worker 1] from worker_1', shown)
      self.assertNotIn('[worker 0] from worker_0', shown)
      self.assertIn(
        'its last lines:\n  from worker_0\n', launcher.stderr().lower()
      )
    self.assertEqual((logs / 'worker_0.log').read_text(), 'from worker_0\n')


if __name__ == '__main__':
  absltest.main()

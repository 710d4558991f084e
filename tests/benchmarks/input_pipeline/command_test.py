"""The command as a user runs it."""

import importlib.util
import os

import pytest
from absl.testing import absltest, parameterized

from tests import tiers
from tests.benchmarks import running
from tests.data import formula

_HAS_SKLEARN = importlib.util.find_spec('sklearn') is not None


def _run(*flags):
  return running.run_benchmark('input_pipeline', *flags)


class CommandTest(formula.DataTestCase, parameterized.TestCase):
  @pytest.mark.soak
  def test_variants_of_a_data_set(self):
    where = self.new_dir()
    report, picture = (os.path.join(where, n) for n in ('r.json', 'steps.svg'))
    done = _run(
      f'--dataset={"digits" if _HAS_SKLEARN else "synthetic"}',
      '--variants=naive,make_dataset',
      '--rounds=2',
      '--num_files=4',
      f'--report_json={report}',
      f'--timeline={picture}',
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    for words in ('| naive ', '| make_dataset ', 'trainer idle'):
      self.assertIn(words, done.stdout)
    running.assert_has_table(self, report)
    found = running.read_json(report)
    self.assertEqual(
      [r['name'] for r in found['rows']], ['naive', 'make_dataset']
    )
    for row in found['rows']:
      self.assertLen(row['rates'], 2)
      self.assertGreater(row['items_per_s'], 0)
    self.assertTrue(os.path.exists(picture))

  def test_pipeline_that_is_no_dataset_fails(self):
    done = _run('--pipeline=builtins:dict', '--variants=pipeline', '--rounds=1')
    self.assertEqual(done.returncode, 1)
    self.assertIn('pipeline: failed', done.stdout)
    self.assertIn('it returned a dict', done.stdout)

  # Each but the first pays the import of TensorFlow for another text.
  @tiers.parameters(
    ('--variants=naiv', "'naiv'"),
    tiers.soak('--variants=torch_0', 'torch_python'),
    tiers.soak('--pipeline=a', 'module:function'),
    tiers.soak('--report_json=/tmp', "report_json='/tmp'.*a directory"),
  )
  def test_bad_flags_are_refused_before_anything_runs(self, flag, words):
    done = _run(flag, '--torch_python=')
    self.assertEqual(done.returncode, 1)
    self.assertRegex(done.stderr, words)


if __name__ == '__main__':
  absltest.main()

"""The command as a user runs it, with a deadline."""

import contextlib
import importlib.util
import io
import os
import sys
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from benchmarks.input_pipeline import children, command, torch_peer
from tests.benchmarks import running
from tests.data import formula
from tf_strategies import errors

_ROOT = os.path.abspath(
  os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)
)
_DEADLINE_S = 120
_HAS_SKLEARN = importlib.util.find_spec('sklearn') is not None


def _run(*flags):
  return running.run_benchmark('input_pipeline', *flags)


class CommandTest(formula.DataTestCase):
  @pytest.mark.soak
  def test_variants_of_a_data_set(self):
    where = self.new_dir()
    report, picture = (os.path.join(where, n) for n in ('r.json', 'steps.html'))
    done = _run(
      f'--dataset={"digits" if _HAS_SKLEARN else "synthetic"}',
      '--variants=naive,make_dataset',
      '--rounds=2',
      '--num_files=4',
      '--stages',
      f'--report_json={report}',
      f'--timeline={picture}',
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    for words in ('| naive ', '| make_dataset ', 'stage of naive', 'bound by'):
      self.assertIn(words, done.stdout)
    running.assert_has_table(self, report)
    found = running.read_json(report)
    self.assertEqual(
      [r['name'] for r in found['rows']], ['naive', 'make_dataset']
    )
    for row in found['rows']:
      self.assertLen(row['rates'], 2)
      self.assertGreater(row['items_per_s'], 0)
      self.assertNotEmpty(row['profile']['stages'])
      self.assertNotEmpty(row['profile']['verdict']['sentence'])
    self.assertTrue(os.path.exists(picture))

  def test_pipeline_that_is_no_dataset_fails(self):
    settings = command.Settings(
      pipeline='builtins:dict',
      variants=['pipeline'],
      rounds=1,
      deadline=_DEADLINE_S,
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
      self.assertEqual(command.run(settings), 1)
    self.assertIn('pipeline: failed', output.getvalue())
    self.assertIn('it returned a dict', output.getvalue())


class SettingsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'variants': ['naiv']}, "'naiv'"),
    ({'variants': ['torch_0'], 'torch_python': ''}, 'torch_python'),
    ({'variants': ['naive'], 'pipeline': 'a:b'}, "'naive'"),
    ({'pipeline': 'a'}, 'module:function'),
    ({'timeline': 'steps.gif'}, 'steps.gif'),
    ({'timeline': '/no/such/dir/a.html'}, 'timeline=.*a.html.*directory'),
    ({'report_json': '/no/such/dir/a.json'}, 'report_json=.*a.json'),
    ({'report_json': '/proc/a.json'}, 'report_json=.*a.json'),
    ({'report_json': '/tmp'}, "report_json='/tmp'.*a directory"),
  )
  def test_bad_settings_are_refused_before_anything_runs(self, values, words):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, words):
      command.run(command.Settings(**values))

  def test_rows_depend_on_what_is_asked_for(self):
    plain = command.Settings(torch_python='').names()
    self.assertNotIn('extract_alone', plain)
    slow = command.Settings(first_byte_ms=10, torch_python='python').names()
    self.assertIn('extract_alone', slow)
    self.assertEqual(slow.index('cache_fast_storage'), slow.index('cache') + 1)
    self.assertContainsSubset(torch_peer.NAMES, slow)
    mine = command.Settings(pipeline='a:b', torch_python='python').names()
    self.assertEqual(mine, ['pipeline', 'pipeline_prefetch', 'pipeline_cache'])


class OutputTest(formula.DataTestCase):
  def test_what_was_measured_is_told_before_the_timeline_is_drawn(self):
    report = os.path.join(self.new_dir(), 'r.json')
    output = io.StringIO()
    with (
      mock.patch.object(command.rounds, 'measure', return_value=[]),
      mock.patch.object(command.timeline_plot, 'write', side_effect=OSError),
      mock.patch.object(command.children, 'Child'),
      mock.patch.object(command.timeline, 'Timeline'),
      contextlib.redirect_stdout(output),
      self.assertRaises(OSError),
    ):
      command.run(
        command.Settings(
          pipeline='a:b',
          train_step_ms=1.0,
          timeline=os.path.join(self.new_dir(), 'steps.html'),
          report_json=report,
        )
      )
    self.assertIn('a:b', output.getvalue())
    self.assertTrue(os.path.exists(report))


class TorchPeerTest(formula.DataTestCase):
  def test_peer_answers_in_an_interpreter_of_its_own(self):
    where = self.new_dir()
    np.save(os.path.join(where, 'images.npy'), formula.images(10))
    np.save(os.path.join(where, 'labels.npy'), np.arange(10))
    spec = {'arrays': where, 'batch_size': 4, 'variant': 'torch_batched_0'}
    with children.Child(
      'torch_batched_0', children.torch_command(sys.executable), _DEADLINE_S
    ) as child:
      if importlib.util.find_spec('torch') is None:
        with self.assertRaisesRegex(
          errors.DataError, "No module named 'torch'"
        ):
          child.ask({'do': 'open', 'spec': spec})
        return
      child.ask({'do': 'open', 'spec': spec})
      found = child.ask({'do': 'run', 'train_step_s': 0.0})
    self.assertEqual((found['num_steps'], found['num_items']), (3, 10))


if __name__ == '__main__':
  absltest.main()

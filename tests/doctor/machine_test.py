"""`tfs doctor` diagnoses this machine, complete or broken in realistic ways."""

import os
import pathlib
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tf_strategies.doctor import findings, machine


def _doctor(*flags, **env):
  """Runs the doctor. Returns its status, findings by name, last line and stderr."""
  done = processes.run_python('-m', 'tf_strategies', 'doctor', *flags, env=env)
  *lines, last = done.stdout.splitlines()
  found, name = {}, ''
  for line in lines:
    if line.startswith(' '):
      found[name] += f' {line.strip()}'
    else:
      name = line[6:20].strip()
      found[name] = f'{line[:4].strip()}: {line[22:]}'
  return done.returncode, found, last, done.stderr


class MachineTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_whole(self):
    directory = self.create_tempdir().full_path
    status, found, last, err = _doctor(f'--checkpoint_dir={directory}')
    self.assertEqual((status, err), (0, ''), found)
    self.assertRegex(
      found['TensorFlow'],
      r'^ok: TensorFlow 2\.\d+\.\d+ with Keras 3\..*: tested',
    )
    self.assertStartsWith(found['checkpoints'], 'ok: written, read and deleted')
    self.assertEmpty(os.listdir(directory))
    self.assertEqual(found['TF_CONFIG'], 'ok: none: this process trains alone')
    self.assertRegex(last, r'^\d+ checks, none failed\.$')

  def test_no_tensorflow(self):
    broken = pathlib.Path(self.create_tempdir().full_path)
    (broken / 'tensorflow.py').write_text(
      "raise ModuleNotFoundError('no libtensorflow')"
    )
    with mock.patch.dict(os.environ, PYTHONPATH=str(broken)):
      known, ending = machine._probe()
    [finding] = machine._software(known, ending)
    self.assertEqual(finding.state, 'FAIL')
    self.assertIn('no libtensorflow', finding.what)
    self.assertIn("pip install '.[cpu]'", finding.fix)
    # The probe reported nothing before it failed.
    self.assertEmpty(known)

  def test_another_backend(self):
    status, found, *_ = _doctor(KERAS_BACKEND='numpy')
    self.assertEqual(status, 1, found)
    self.assertIn('its backend is numpy', found['Keras'])
    self.assertIn('Fix: unset KERAS_BACKEND', found['Keras'])

  @parameterized.parameters(
    ('2.21.0', '3.15.1', 'ok', 'tested'),
    ('2.22.0', '3.16.0', 'note', 'TensorFlow and Keras was not tested'),
  )
  def test_versions(self, tensorflow, keras, state, words):
    known = {'TensorFlow': tensorflow, 'Keras': keras, 'backend': 'tensorflow'}
    known |= {'gpus': [], 'is_for_gpus': False}
    finding = machine._software(known, '')[0]
    self.assertEqual(finding.state, state)
    self.assertIn(words, finding.what)

  @parameterized.parameters(
    (['H100'], None, 'ok', 'H100'),
    ([], None, 'FAIL', 'its build is for CPUs'),
    ([], '-1', 'note', 'CUDA_VISIBLE_DEVICES'),
  )
  def test_gpus(self, gpus, hidden, state, words):
    known = {'gpus': gpus, 'is_for_gpus': False}
    env = {} if hidden is None else {'CUDA_VISIBLE_DEVICES': hidden}
    with (
      mock.patch.object(machine.glob, 'glob', lambda _: ['/dev/nvidia0']),
      mock.patch.dict(os.environ, env),
    ):
      if hidden is None:
        os.environ.pop('CUDA_VISIBLE_DEVICES', None)
      finding = machine._gpus(known)
    self.assertEqual(finding.state, state)
    self.assertIn(words, finding.what)

  def test_directory_that_cannot_be_written(self):
    path = self.create_tempfile().full_path
    finding = findings.of('checkpoints', machine._directory, path)
    self.assertEqual(finding.state, 'FAIL')
    self.assertIn(path, finding.what)
    self.assertNotIn('.tfs-doctor', finding.what)
    self.assertIn('that this user can write', finding.fix)

  def test_clock_of_another_time(self):
    self.assertIn('UTC', machine._clock())
    with mock.patch.object(time, 'time', lambda: 0.0):
      finding = machine._clock()
    self.assertEqual(finding.state, 'FAIL')
    self.assertIn('1970', finding.what)


if __name__ == '__main__':
  absltest.main()

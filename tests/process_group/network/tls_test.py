"""Workers that encrypt: the same bits, and errors where certificates differ."""

import dataclasses
import os
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests import certificates, processes, tiers
from tests.process_group import meetings
from tf_strategies import errors
from tf_strategies.process_group import options

_VARIABLES = options.TLS_VARIABLES


def _environment(directory):
  made = certificates.make(directory)
  return dict(zip(_VARIABLES, dataclasses.astuple(made), strict=True))


def _sums(rank, per_rank):
  """Returns the sums that a worker gets, or its error."""
  for variable in _VARIABLES:
    os.environ.pop(variable, None)
  os.environ.update(per_rank[rank])
  try:
    with (
      meetings.meet(rank, rendezvous_timeout_seconds=20) as meeting,
      meeting.form() as group,
    ):
      results = []
      for size in (1, 1000, 70_000, 3_000_000):
        random = np.random.default_rng(rank)
        array = random.standard_normal(size).astype(np.float32)
        results.append(group.all_reduce(array, name='w').tobytes())
      group.exchange('late', b'x' * 100_000)
      group.barrier()
      return results
  except errors.Error as e:
    return type(e).__name__, str(e)


class TlsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.job = _environment(self.create_tempdir().full_path)
    self.other = _environment(self.create_tempdir().full_path)

  @pytest.mark.smoke
  def test_sums_have_the_same_bits(self):
    plain = processes.run_workers(_sums, 3, args=([{}] * 3,))
    secure = processes.run_workers(_sums, 3, args=([self.job] * 3,))
    self.assertLen(plain[0], 4)
    self.assertEqual(plain, secure)

  @tiers.parameters((True, 'certificate'), tiers.soak(False, 'TFS_TLS_CERT'))
  def test_peer_that_does_not_fit_is_told_to_both(self, has_tls, words):
    other = self.other if has_tls else {}
    results = processes.run_workers(_sums, 2, args=([self.job, other],))
    for kind, message in results:
      self.assertEqual(kind, 'AuthenticationError')
      self.assertIn(words, message)


class FilesTest(parameterized.TestCase):
  def test_files_that_are_none_are_named(self):
    made = certificates.make(self.create_tempdir().full_path)
    text = self.create_tempfile(content='no key').full_path
    for name in ('certificate', 'key', 'authority'):
      for wrong in (text, text + '.absent'):
        files = dataclasses.replace(made, **{name: wrong})
        with self.assertRaisesRegex(errors.UnsupportedOptionError, wrong):
          options.GroupOptions(tls=files)

  def test_key_that_others_can_read_is_refused(self):
    made = certificates.make(self.create_tempdir().full_path)
    os.chmod(made.key, 0o644)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'chmod 600'):
      options.GroupOptions(tls=made)

  def test_environment_names_all_or_none(self):
    made = certificates.make(self.create_tempdir().full_path)
    files = dict(zip(_VARIABLES, dataclasses.astuple(made), strict=True))
    with mock.patch.dict(os.environ, files):
      self.assertEqual(options.GroupOptions.from_env().tls, made)
      del os.environ['TFS_TLS_CA']
      with self.assertRaisesRegex(ValueError, 'without TFS_TLS_CA'):
        options.GroupOptions.from_env()


if __name__ == '__main__':
  absltest.main()

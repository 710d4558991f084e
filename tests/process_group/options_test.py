import os
from unittest import mock

from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.process_group import options

_SECRET = b'0123456789abcdef'


def _env(**variables):
  clean = {k: v for k, v in os.environ.items() if not k.startswith('TFS_')}
  return mock.patch.dict(os.environ, {**clean, **variables}, clear=True)


class GroupOptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    {'rendezvous_timeout_seconds': 0},
    {'collective_timeout_seconds': '5'},
    {'heartbeat_timeout_seconds': True},
    {'window_seconds': float('inf')},
    {'min_workers': 0},
    {'max_workers': True},
    {'min_workers': 3, 'max_workers': 2},
    {'secret': 'a string, though long enough'},
    {'secret': b'too few'},
  )
  def test_unusable_value_is_refused(self, **values):
    with self.assertRaises(errors.UnsupportedOptionError) as raised:
      options.GroupOptions(**values)
    self.assertIn('Fix', str(raised.exception))
    self.assertNotIn('too few', str(raised.exception))

  def test_secret_is_not_printed(self):
    made = options.GroupOptions(secret=_SECRET)
    self.assertEqual(made.secret, _SECRET)
    self.assertNotIn('0123', repr(made))

  def test_secret_of_the_environment(self):
    with _env(TFS_SECRET=_SECRET.decode()):
      made = options.GroupOptions.from_env(min_workers=2)
      self.assertEqual((made.secret, made.min_workers), (_SECRET, 2))
      other = options.GroupOptions.from_env(secret=None)
      self.assertIsNone(other.secret)

  def test_variable_that_asked_for_encryption_is_not_ignored(self):
    with (
      _env(TFS_TLS_CERT='worker.pem'),
      self.assertRaisesRegex(errors.UnsupportedOptionError, 'TFS_TLS_CERT'),
    ):
      options.GroupOptions.from_env()

  def test_secret_of_a_file(self):
    path = self.create_tempfile(content=_SECRET.decode() + '\n').full_path
    os.chmod(path, 0o600)
    with _env(TFS_SECRET_FILE=path):
      self.assertEqual(options.GroupOptions.from_env().secret, _SECRET)
    with (
      _env(TFS_SECRET_FILE=path + '.absent'),
      self.assertRaisesRegex(ValueError, 'No such file'),
    ):
      options.GroupOptions.from_env()
    with (
      _env(TFS_SECRET_FILE=path, TFS_SECRET='x' * 20),
      self.assertRaisesRegex(
        ValueError, 'TFS_SECRET or TFS_SECRET_FILE, got both'
      ),
    ):
      options.GroupOptions.from_env()

  @parameterized.parameters(
    (0o440, True),
    (0o644, False),
    (0o620, False),
  )
  def test_secret_file_that_others_can_use_is_refused(self, mode, is_fine):
    path = self.create_tempfile(content=_SECRET.decode()).full_path
    os.chmod(path, mode)
    link = path + '.link'  # As a mounted secret is one.
    os.symlink(path, link)
    for where in (path, link):
      with _env(TFS_SECRET_FILE=where):
        if is_fine:
          self.assertEqual(options.GroupOptions.from_env().secret, _SECRET)
        else:
          with self.assertRaisesRegex(
            errors.UnsupportedOptionError, f'{mode:04o}.*chmod 600 {where}'
          ):
            options.GroupOptions.from_env()

  @mock.patch.object(os, 'fstatvfs')
  def test_secret_that_an_orchestrator_mounts_is_accepted(self, fstatvfs):
    path = self.create_tempfile(content=_SECRET.decode()).full_path
    os.chmod(path, 0o644)
    fstatvfs.return_value = mock.Mock(f_flag=os.ST_RDONLY)
    with _env(TFS_SECRET_FILE=path):
      self.assertEqual(options.GroupOptions.from_env().secret, _SECRET)
    fstatvfs.return_value = mock.Mock(f_flag=0)
    with (
      _env(TFS_SECRET_FILE=path),
      self.assertRaises(errors.UnsupportedOptionError),
    ):
      options.GroupOptions.from_env()

  def test_empty_secret_is_refused_and_none_is_none(self):
    with _env():
      self.assertIsNone(options.GroupOptions.from_env().secret)
    with _env(TFS_SECRET=''), self.assertRaisesRegex(ValueError, '0 bytes'):
      options.GroupOptions.from_env()


if __name__ == '__main__':
  absltest.main()

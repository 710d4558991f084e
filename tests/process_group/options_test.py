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
    {'min_workers': 3, 'max_workers': 2},
    {'secret': 'a string, though long enough'},
    {'secret': b'too few'},
  )
  def test_invalid_value_is_refused(self, **values):
    with self.assertRaises(errors.UnsupportedOptionError) as raised:
      options.GroupOptions(**values)
    self.assertIn('Fix', str(raised.exception))
    self.assertNotIn('too few', str(raised.exception))

  def test_secret_from_environment_is_read_and_not_printed(self):
    with _env(TFS_SECRET=_SECRET.decode()):
      made = options.GroupOptions.from_env(min_workers=2)
      self.assertEqual((made.secret, made.min_workers), (_SECRET, 2))
      self.assertNotIn(_SECRET.decode(), repr(made))
      self.assertIsNone(options.GroupOptions.from_env(secret=None).secret)
    with _env():
      self.assertIsNone(options.GroupOptions.from_env().secret)

  def test_removed_tls_variable_is_refused(self):
    with (
      _env(TFS_TLS_CERT='worker.pem'),
      self.assertRaisesRegex(errors.UnsupportedOptionError, 'TFS_TLS_CERT'),
    ):
      options.GroupOptions.from_env()

  @parameterized.parameters(
    ({'TFS_SECRET_FILE': '/absent'}, 'No such file'),
    (
      {'TFS_SECRET_FILE': '/absent', 'TFS_SECRET': 'x' * 20},
      'TFS_SECRET or TFS_SECRET_FILE, got both',
    ),
    ({'TFS_SECRET': ''}, '0 bytes'),
  )
  def test_unreadable_secret_is_refused(self, variables, message):
    with _env(**variables), self.assertRaisesRegex(ValueError, message):
      options.GroupOptions.from_env()

  @parameterized.parameters(
    (0o440, 0, True),
    (0o644, 0, False),
    (0o620, 0, False),
    (0o644, os.ST_RDONLY, True),  # A read-only mount.
  )
  def test_secret_file_must_be_private(self, mode, flag, is_fine):
    path = self.create_tempfile(content=_SECRET.decode() + '\n').full_path
    os.chmod(path, mode)
    link = path + '.link'  # Mounted secrets are links.
    os.symlink(path, link)
    mounted = mock.Mock(f_flag=flag)
    for where in (path, link):
      with (
        _env(TFS_SECRET_FILE=where),
        mock.patch.object(os, 'fstatvfs', return_value=mounted),
      ):
        if is_fine:
          self.assertEqual(options.GroupOptions.from_env().secret, _SECRET)
        else:
          with self.assertRaisesRegex(
            errors.UnsupportedOptionError, f'{mode:04o}.*chmod 600 {where}'
          ):
            options.GroupOptions.from_env()


if __name__ == '__main__':
  absltest.main()

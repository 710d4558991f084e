"""`tfs doctor` diagnoses complete jobs, and jobs broken in realistic ways."""

import json
import os
import socket
import sys
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests import certificates
from tf_strategies.doctor import job
from tf_strategies.launch import ports as ports_lib

_SECRET = '5ec7e7' * 8
_SECONDS = 60.0


def _config(workers, index=0, task_type='worker', **jobs):
  cluster = {'worker': workers, **jobs}
  return json.dumps(
    {'cluster': cluster, 'task': {'type': task_type, 'index': index}}
  )


def _free(count):
  return [f'127.0.0.1:{port}' for port in ports_lib.pick_ports(count)]


class JobCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    variables = ('TFS_SECRET', 'TFS_SECRET_FILE', 'TF_CONFIG')
    variables += ('TFS_TLS_CERT', 'TFS_TLS_KEY', 'TFS_TLS_CA')
    kept = {k: v for k, v in os.environ.items() if k not in variables}
    self.enter_context(mock.patch.dict(os.environ, kept, clear=True))

  def look(self, config=None, wait=0.0, **env):
    """Returns the findings by name."""
    environ = {} if config is None else {'TF_CONFIG': config}
    with mock.patch.dict(os.environ, env):
      return {f.name: f for f in job.look(environ, wait)}

  def assert_fails(self, found, name, *words):
    """Checks that only one check failed, with `words` in its text and with a fix."""
    failed = [n for n, f in found.items() if f.state == 'FAIL']
    self.assertEqual(failed, [name], found)
    for word in words:
      self.assertIn(word, found[name].what)
    self.assertNotEmpty(found[name].fix)


class WholeTest(JobCase):
  @pytest.mark.smoke
  def test_no_job(self):
    found = self.look()
    self.assertEqual({f.state for f in found.values()}, {'ok'})

  def test_others_are_not_there_yet(self):
    found = self.look(_config(_free(3), 1))
    self.assertEqual(found['TF_CONFIG'].state, 'ok')
    self.assertStartsWith(found['TF_CONFIG'].what, 'worker 1 of 3 worker at ')
    self.assertEqual(found['port'].state, 'ok')
    self.assertEqual(found['other tasks'].state, 'note')
    self.assertIn('worker 0, worker 2', found['other tasks'].what)
    self.assertIn('--wait', found['other tasks'].fix)
    # A doctor that already waits for the others does not suggest it.
    found = self.look(_config(_free(3), 1), wait=0.1)
    self.assertEqual(found['other tasks'].state, 'note')
    self.assertEqual(found['other tasks'].fix, '')
    self.assertEqual(found['meeting'].state, 'FAIL')

  @pytest.mark.smoke
  def test_others_are_there(self):
    with socket.create_server(('127.0.0.1', 0)) as server:
      there = f'127.0.0.1:{server.getsockname()[1]}'
      found = self.look(_config([*_free(1), there]))
    self.assertEqual({f.state for f in found.values()}, {'ok'}, found)

  def test_certificate_of_the_job(self):
    made = certificates.make(self.create_tempdir().full_path)
    found = self.look(
      _config(_free(2)),
      TFS_TLS_CERT=made.certificate,
      TFS_TLS_KEY=made.key,
      TFS_TLS_CA=made.authority,
    )
    self.assertEqual(found['TLS'].state, 'ok', found['TLS'])
    self.assertIn(made.certificate, found['TLS'].what)


class BrokenTest(JobCase):
  @parameterized.named_parameters(
    ('index', _config(['a:1', 'b:1'], 2), 'task.index is 2', '0 to 1'),
    ('port', _config(['a:1', 'b']), "'b'", 'with a port'),
  )
  def test_config(self, config, *words):
    found = self.look(config)
    self.assertLen(found, 1)
    self.assert_fails(found, 'TF_CONFIG', *words)

  def test_port_in_use(self):
    with socket.create_server(('127.0.0.1', 0)) as server:
      mine = f'127.0.0.1:{server.getsockname()[1]}'
      found = self.look(_config([mine, *_free(1)]))
    self.assert_fails(found, 'port', mine, 'Another process has it')

  def test_no_secret_over_several_hosts(self):
    address = f'{socket.gethostname()}:{ports_lib.pick_ports(1)[0]}'
    found = self.look(_config([*_free(1), address]))
    self.assertEqual(found['secret'].state, 'FAIL')
    self.assertIn(address, found['secret'].what)
    self.assertIn('TFS_SECRET', found['secret'].fix)

  @parameterized.parameters(
    ({'TFS_SECRET': 'short'}, 'a secret of 5 bytes'),
    ({'TFS_SECRET_FILE': '/no/such/file'}, '/no/such/file'),
  )
  def test_wrong_secret(self, env, words):
    self.assert_fails(self.look(**env), 'secret', words)

  def test_secret_that_others_can_read(self):
    path = self.create_tempfile(content=_SECRET).full_path
    os.chmod(path, 0o644)
    found = self.look(TFS_SECRET_FILE=path)
    self.assert_fails(found, 'secret', path, '0644')
    self.assertIn('chmod 600', found['secret'].fix)

  def test_certificate_of_another_authority(self):
    made, other = (
      certificates.make(self.create_tempdir().full_path) for _ in range(2)
    )
    found = self.look(
      TFS_TLS_CERT=made.certificate,
      TFS_TLS_KEY=made.key,
      TFS_TLS_CA=other.certificate,
    )
    self.assert_fails(found, 'TLS', made.certificate, 'self-signed')


class MeetingTest(absltest.TestCase):
  """Doctors of all tasks of a job, each in its own process."""

  def _doctors(self, workers, secrets, seconds=20):
    """Returns the status and the output of each doctor."""
    code = (
      'import sys; from tf_strategies.doctor import job\n'
      'found = list(job.look(wait=float(sys.argv[1]), versions={"a": 1}))\n'
      'print(*found, sep="\\n")\n'
      'sys.exit(any(f.state == "FAIL" for f in found))\n'
    )
    started = []
    for index, secret in enumerate(secrets):
      changes = {'TF_CONFIG': _config(workers, index)}
      if secret:
        changes['TFS_SECRET'] = secret
      env = processes.python_environment(changes, ['TFS_SECRET_FILE'])
      words = [sys.executable, '-c', code, str(seconds)]
      started.append(
        self.enter_context(
          processes.Command(words, env=env, deadline_seconds=_SECONDS)
        )
      )
    return [(command.wait(), command.output()) for command in started]

  @pytest.mark.smoke
  def test_whole(self):
    for status, text in self._doctors(_free(2), [_SECRET] * 2):
      self.assertEqual(status, 0, text)
      self.assertIn('2 tasks met', text)
      self.assertRegex(text, r'links +to [01] by (memory|slots|socket)')
      self.assertRegex(text, r'clocks +within 0\.\d\d s')

  def test_secret_differs(self):
    for status, text in self._doctors(_free(2), [_SECRET, _SECRET[::-1]]):
      self.assertEqual(status, 1, text)
      self.assertRegex(text, r'FAIL  meeting .*does not know the secret')
      self.assertIn('TFS_SECRET', text)

  def test_under_the_launcher(self):
    done = processes.run_python(
      *('-m', 'tf_strategies', 'launch', '--num_workers=2', '--num_ps=1'),
      *('--chief', '--', sys.executable, '-m', 'tf_strategies', 'doctor'),
      '--wait=60',
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn('[chief 0] ok    meeting         4 tasks met', done.stdout)


if __name__ == '__main__':
  absltest.main()

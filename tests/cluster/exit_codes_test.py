import signal

from absl.testing import absltest, parameterized

from benchmarks import processes
from tf_strategies import errors
from tf_strategies.cluster import exit_codes

_PERMANENT = (
  errors.UnsupportedOptionError,
  errors.UnsupportedVersionError,
  errors.ClusterConfigError,
  errors.DataError,
  errors.CheckpointMismatchError,
  errors.ScheduleError,
  errors.ScopeError,
  errors.AuthenticationError,
  errors.CollectiveMismatchError,
  errors.ResourceLimitError,
  errors.StorageError,
  errors.TakenOverError,
  RuntimeError,
  KeyError,
)
_RESTARTABLE = (
  errors.RendezvousError,
  errors.WorkerUnavailableError,
  errors.ParameterServerUnavailableError,
  errors.CollectiveTimeoutError,
  # The process that uses the resource may be about to end.
  errors.InUseError,
)
_DONE = (errors.JobFinishedError,)


class ExitCodeTest(parameterized.TestCase):
  @parameterized.parameters(
    (_PERMANENT, exit_codes.PERMANENT_EXIT_CODES),
    (_RESTARTABLE, [exit_codes.RESTARTABLE_EXIT_CODE]),
    (_DONE, [0]),
  )
  def test_exit_code_shows_whether_a_restart_may_help(self, kinds, codes):
    for kind in kinds:
      self.assertIn(exit_codes.exit_code(kind('x')), codes, kind)

  def test_every_error_type_has_an_exit_code(self):
    ours = {
      kind
      for kind in vars(errors).values()
      if isinstance(kind, type) and issubclass(kind, errors.Error)
    }
    self.assertEmpty(ours - {*_PERMANENT, *_RESTARTABLE, *_DONE, errors.Error})

  @parameterized.parameters(
    ('errors.WorkerUnavailableError("worker 1 died")', 143),
    ('errors.ClusterConfigError("no task")', 2),
    # Python ends itself by SIGINT.
    ('KeyboardInterrupt()', -signal.SIGINT),
  )
  def test_process_exits_with_the_code_and_prints_the_error(
    self, error, status
  ):
    code = f"""
from tf_strategies import errors
from tf_strategies.cluster import exit_codes
with exit_codes.exiting():
  raise {error}
"""
    done = processes.run_python('-c', code)
    self.assertEqual(done.returncode, status)
    if status in (2, 143):
      self.assertIn('Traceback', done.stderr)
      self.assertIn(error.partition('"')[2].rstrip('")'), done.stderr)


if __name__ == '__main__':
  absltest.main()

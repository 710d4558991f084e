import signal

from absl.testing import absltest, parameterized

from benchmarks import processes
from tf_strategies import errors
from tf_strategies.cluster import exit_codes

_PERMANENT = (
  errors.UnsupportedOptionError('x'),
  errors.UnsupportedVersionError('x'),
  errors.ClusterConfigError('x'),
  errors.DataError('x'),
  errors.CheckpointMismatchError('x'),
  errors.ScheduleError('x'),
  errors.ScopeError('x'),
  errors.AuthenticationError('x'),
  errors.CollectiveMismatchError('x'),
  errors.ResourceLimitError('x'),
  errors.StorageError('x'),
  errors.TakenOverError('x'),
  RuntimeError('x'),
  KeyError('x'),
)
_RESTARTABLE = (
  errors.RendezvousError('x'),
  errors.WorkerUnavailableError('x'),
  errors.ParameterServerUnavailableError('x'),
  errors.CollectiveTimeoutError('x'),
  # The other process may be one that is about to end.
  errors.InUseError('x'),
)
_DONE = (errors.JobFinishedError('x'),)


class ExitCodeTest(parameterized.TestCase):
  @parameterized.parameters(
    (_PERMANENT, exit_codes.PERMANENT_EXIT_CODES),
    (_RESTARTABLE, [exit_codes.RESTARTABLE_EXIT_CODE]),
    (_DONE, [0]),
  )
  def test_says_whether_another_attempt_may_help(self, kinds, codes):
    for error in kinds:
      self.assertIn(exit_codes.exit_code(error), codes, error)

  def test_every_error_of_ours_was_thought_of(self):
    known = {type(error) for error in (*_PERMANENT, *_RESTARTABLE, *_DONE)}
    ours = {
      kind
      for kind in vars(errors).values()
      if isinstance(kind, type) and issubclass(kind, errors.Error)
    }
    self.assertEmpty(ours - known - {errors.Error})

  @parameterized.parameters(
    ('errors.WorkerUnavailableError("worker 1 died")', 143),
    ('errors.ClusterConfigError("no task")', 2),
    # Python ends itself by SIGINT.
    ('KeyboardInterrupt()', -signal.SIGINT),
  )
  def test_process_exits_with_it_and_shows_the_error(self, error, status):
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

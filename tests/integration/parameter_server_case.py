"""Shared code of the tests of parameter server faults."""

import os
import pathlib
import signal
import tempfile
import time

from tests import parameter_servers, tf_case
from tests.integration import parameter_server_programs as programs

EPOCHS = 3
STEPS = EPOCHS * programs.STEPS_PER_EPOCH


class FaultsTestCase(tf_case.TestCase):
  """A chief that reports its progress in a file, and its checkpoints."""

  def setUp(self):
    super().setUp()
    directory = tempfile.TemporaryDirectory()
    self.addCleanup(directory.cleanup)
    self.progress = os.path.join(directory.name, 'progress')
    self.checkpoints = os.path.join(directory.name, 'checkpoints')

  def wait_for_batch(self, job, batch, of='', seconds=120):
    """Waits until `fit`, or every `evaluate` with '.test', has finished `batch`
    batches.
    """
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
      if self.batches(of) >= batch:
        return
      self.assertTrue(job.is_alive('chief', 0), 'the chief has ended')
      time.sleep(0.02)
    self.fail(f'batch {batch} was not reached')

  def batches(self, of=''):
    """Returns the number of batches that `fit`, or with '.test' `evaluate`,
    finished.
    """
    if not os.path.exists(self.progress + of):
      return 0
    with open(self.progress + of) as f:
      return int(f.read() or 0)

  def inject_faults(self, job, faults):
    """Applies a schedule of faults to the tasks of a job, in order.

    Args:
      job: the job.
      faults: tuples of an action and its target. ('at', 130) waits for a batch of
        `fit`, ('at', 1, '.test') for one of `evaluate`, and ('wait', 6.0) for some
        seconds. 'kill', 'start', 'restart' (both), 'stop' and 'continue' take a task:
        ('kill', 'ps', 1).
    """
    actions = {
      'at': lambda *batch: self.wait_for_batch(job, *batch),
      'wait': time.sleep,
      'kill': job.kill,
      'start': job.start,
      'restart': job.restart,
      'stop': lambda *task: job.signal(*task, signal.SIGSTOP),
      'continue': lambda *task: job.signal(*task, signal.SIGCONT),
    }
    for action, *arguments in faults:
      if action in ('kill', 'restart'):
        self.killed_at = time.time()
      actions[action](*arguments)

  def run_with_faults(
    self, faults, arguments, program=programs.train, **options
  ):
    """Runs a program, injects faults, and returns the chief's result.

    Args:
      faults: see `inject_faults`.
      arguments: arguments of the program.
      program: function that the chief runs.
      **options: options of the job.
    """
    with parameter_servers.Job(**options) as job:
      job.start_chief(program, arguments)
      self.inject_faults(job, faults)
      return self.finish(job)

  def wait_until_quiet(self):
    """Waits until no new step begins because all workers wait."""
    batches = None
    while (found := self.batches()) != batches:
      batches = found
      time.sleep(1.5)

  def arguments(
    self, worker_input=False, validates=False, at_once=1, saves=0, **options
  ):
    """Returns the arguments of `programs.train`.

    Args:
      worker_input: whether workers read the data themselves.
      validates: whether each epoch ends with an evaluation.
      at_once: steps per execution.
      saves: steps between checkpoints; 0 saves none.
      **options: options of the strategy.
    """
    if saves:
      options = {
        'checkpoint_dir': self.checkpoints,
        'checkpoint_steps': saves,
        **options,
      }
    run = self.progress, EPOCHS, worker_input, options, validates
    return (*run, at_once)

  def finish(self, job):
    """Returns the chief's result, after checking that it ended by itself."""
    outcome = job.wait()
    self.assertEqual((outcome.exitcode, outcome.error_text), (0, ''))
    return outcome.value

  def kept(self):
    """Returns the checkpoints, oldest first."""
    return sorted(pathlib.Path(self.checkpoints).glob('checkpoint-*'))

  def unfinished(self):
    """Returns the names of unfinished checkpoints."""
    names = set(os.listdir(self.checkpoints)) - {'owner.json', 'finished'}
    return [n for n in names if not n.startswith('checkpoint-')]

  def files(self):
    """Returns the contents of all checkpoint files by path."""
    paths = sorted(pathlib.Path(self.checkpoints).glob('*/**/*'))
    return {str(p): p.read_bytes() for p in paths if p.is_file()}


def damage(path, kind):
  """Damages a file as a faulty disk or a user might."""
  raw = path.read_bytes()
  if kind == 'delete':
    path.unlink()
    return
  half = len(raw) // 2
  flipped = raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :]
  path.write_bytes(
    {'truncate': raw[:half], 'flip': flipped, 'empty': b''}[kind]
  )

"""SIGTERM to real processes: a single one, one of two workers, or the launcher."""

import dataclasses
import json
import os
import pathlib
import random
import signal
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from benchmarks import processes
from tests import tf_case
from tests.fault_tolerance import preemption_program as program

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_DEADLINE_SECONDS = 180
_STEPS = program.EPOCHS * program.STEPS
_RESTARTABLE = 143


class Job(processes.Command):
  """The program as a user starts it. It ends with the test.

  Args:
    options: options of the program.
    workers: number of workers. 0 starts no launcher.
    restarts: maximum number of restarts of each worker.
  """

  def __init__(self, options, workers=0, restarts=0):
    self._directory = options.directory
    command = [sys.executable, '-m', 'tests.fault_tolerance.preemption_program']
    command.append(json.dumps(dataclasses.asdict(options)))
    if workers:
      launch = [sys.executable, '-m', 'tf_strategies.launch']
      launch += [f'--num_workers={workers}', f'--max_restarts={restarts}']
      command = [*launch, '--grace_period=60', '--', *command]
    super().__init__(
      command,
      name='the job',
      log=os.path.join(self._directory, 'output'),
      cwd=_ROOT,
      env=processes.environment(
        {'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
      ),
      deadline_seconds=_DEADLINE_SECONDS,
      # The launcher ends its workers.
      grace_seconds=20.0,
    )

  def wait_for_step(self, rank, step):
    """Waits until a worker of this job has done a step. Returns its pid."""
    path = pathlib.Path(self._directory, f'step_{rank}')
    self.wait_until(lambda: path.exists() and _pid_and_step(path)[1] >= step)
    return _pid_and_step(path)[0]


def _pid_and_step(path):
  return [int(word) for word in path.read_text(encoding='utf-8').split()]


class PreemptionJobTest(tf_case.TestCase):
  def _options(self, loop, workers, strategy=None):
    of_one = 'multi_worker_ring' if workers else 'ring_mirrored'
    return program.Options(
      loop=loop,
      strategy=strategy or of_one,
      devices=1 if workers else 2,
      directory=self.create_tempdir().full_path,
      step_seconds=0.01,
    )

  def _finish(self, options, workers):
    """Trains to the end. Returns the output."""
    with Job(options, workers) as job:
      self.assertEqual(job.wait(), 0, job.output()[-5000:])
      return job.output()

  def _results(self, options):
    with np.load(os.path.join(options.directory, 'state.npz')) as f:
      state = dict(f)
    path = os.path.join(options.directory, 'history')
    with open(path, encoding='utf-8') as f:
      return state, json.load(f)

  def _preempt(self, options, workers, target, step):
    """Interrupts a run with SIGTERM after `step`. Returns its output.

    Args:
      options: options of the program.
      workers: number of workers, as for `Job`.
      target: rank of the worker, or None for the launcher.
      step: step after which the signal is sent, at the earliest.
    """
    with Job(options, workers, restarts=1) as job:
      pid = job.wait_for_step(target or 0, step)
      if workers and target is None:
        pid = job.process.pid
      os.kill(pid, signal.SIGTERM)
      if workers and target is not None:
        self.assertEqual(job.wait(), 0, job.output()[-5000:])
        return job.output()
      self.assertEqual(job.wait(), _RESTARTABLE, job.output()[-5000:])
      before = job.output()
    return before + self._finish(options, workers)

  def assert_equal_if_preempted(self, loop, workers, signals, strategy=None):
    """Compares an uninterrupted run with runs preempted by each of `signals`."""
    options = self._options(loop, workers, strategy)
    self._finish(options, workers)
    expected = self._results(options)
    for target, step in signals:
      options = self._options(loop, workers, strategy)
      output = self._preempt(options, workers, target, step)
      message = f'{options}, signal to {target} after step {step}:\n{output}'
      # All processes stopped at the same step and wrote one checkpoint.
      stops = [
        line.partition('Preempted at ')[2].partition(':')[0]
        for line in output.splitlines()
        if 'Preempted at ' in line
      ]
      self.assertLen(stops, max(workers, 1), message)
      self.assertLen(set(stops), 1, message)
      saved = [
        line for line in output.splitlines() if f'at {stops[0]} in' in line
      ]
      self.assertLen(saved, 1, message)
      state, history = self._results(options)
      self.assertEqual(list(state), list(expected[0]))
      for name, value in expected[0].items():
        np.testing.assert_array_equal(value, state[name], f'{name}, {message}')
      for epoch, values in history.items():
        self.assertEqual(values, expected[1][epoch], message)

  def test_preempted_worker_of_two_resumes_exactly(self):
    self.assert_equal_if_preempted('fit', 2, [(1, 25)])

  @parameterized.product(
    loop=('fit', 'custom'), workers=(0, 2), part=tuple(range(5))
  )
  @pytest.mark.soak
  def test_preemption_at_random_steps(self, loop, workers, part):
    del part  # Ten steps in one test would take too long on a busy machine.
    # Not the last steps: the signal might arrive after the end.
    signals = [
      (random.choice([0, 1, None]) if workers else 0, step)
      for step in random.choices(range(1, _STEPS - 9), k=2)
    ]
    print(
      f'{loop}, {workers} workers: signals to a target after a step {signals}'
    )
    self.assert_equal_if_preempted(loop, workers, signals)

  @parameterized.product(loop=('fit', 'custom'), target=(0, 1))
  @pytest.mark.soak
  def test_preemption_with_collective_strategy(self, loop, target):
    signals = [(target, random.randint(1, 50))]
    self.assert_equal_if_preempted(loop, 2, signals, 'multi_worker_collective')


if __name__ == '__main__':
  tf.test.main()

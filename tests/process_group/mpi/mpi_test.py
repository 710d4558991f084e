"""Groups over MPI: real ranks under mpiexec, compared bit by bit."""

import importlib.util
import os
import pathlib
import pickle
import shutil
import sys
import time
import types
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests import tiers
from tests.process_group import conformance
from tests.process_group.mpi import programs
from tests.process_group.mpi import rank as rank_program
from tf_strategies import errors, process_group

_DEADLINE_SECONDS = 120


def _mpiexec():
  beside = pathlib.Path(sys.executable).with_name('mpiexec')
  return str(beside) if beside.exists() else shutil.which('mpiexec')


_needs_mpi = pytest.mark.skipif(
  importlib.util.find_spec('mpi4py') is None or _mpiexec() is None,
  reason="needs mpi4py and mpiexec: pip install '.[mpi]'",
)


def _run(directory, program, count):
  """Runs a program on some ranks; the status and what each rank noted."""
  command = [sys.executable, rank_program.__file__, program, str(directory)]
  if count is not None:
    command = [_mpiexec(), '-n', str(count), *command]
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
  with processes.Command(
    command, name=program, env=environment, deadline_seconds=_DEADLINE_SECONDS
  ) as run:
    try:
      status = run.wait()
    except errors.WorkerUnavailableError as e:
      status = str(e)
    text = run.output()
  notes = {
    int(path.stem): pickle.loads(path.read_bytes())
    for path in pathlib.Path(directory).glob('*.pickle')
  }
  return status, notes, text


class _RanksTestCase(parameterized.TestCase):
  def run_ranks(self, program, count):
    """Returns the notes of each rank; all ranks must end well."""
    directory = self.create_tempdir().full_path
    status, notes, log = _run(directory, program, count)
    self.assertEqual(status, 0, log)
    self.assertEqual(sorted(notes), list(range(count or 1)), log)
    return [notes[rank] for rank in sorted(notes)]

  def run_failing(self, program, count):
    """Returns the exit status, the notes that ranks have written, and the log."""
    start = time.monotonic()
    directory = self.create_tempdir().full_path
    status, notes, log = _run(directory, program, count)
    self.assertIsInstance(status, int, log)
    self.assertLess(time.monotonic() - start, _DEADLINE_SECONDS)
    return status, notes, log


@_needs_mpi
class CollectivesTest(_RanksTestCase):
  @tiers.parameters(tiers.soak(2), tiers.smoke(3), tiers.soak(4))
  def test_table_of_algorithms_and_dtypes(self, count):
    notes = dict(note['table'] for note in self.run_ranks('table', count))
    results = [notes[rank] for rank in range(count)]
    conformance.assert_results(self, results, large='direct')

  @tiers.parameters(tiers.soak(1), tiers.soak(2), 3, tiers.soak(4))
  def test_arrays_of_any_shape_reach_all(self, count):
    notes = self.run_ranks('move', count)
    rows = [programs.raw(programs.rows(r)) for r in range(count)]
    empty = programs.raw(np.empty((0, 3)))
    latest = max(note['barrier'][0] for note in notes)
    for rank, note in enumerate(notes):
      self.assertEqual(note['who'], (rank, count, 'mpi', False, 1))
      self.assertEqual(note['gathered'], rows)
      self.assertEqual(note['empty'], [empty] * count)
      for root in range(count):
        many = programs.numbers(root, 30000, np.float64).reshape(3, -1)
        self.assertEqual(note[root, 'many'], programs.raw(many))
        scalar = programs.raw(np.array(root + 0.5, '>f4'))
        self.assertEqual(note[root, 'scalar'], scalar)
        none = programs.raw(np.empty((2, 0), np.int32))
        self.assertEqual(note[root, 'none'], none)
      # So many floats can be divided by all these counts.
      self.assertEqual(note['sent'], 2 * (count - 1) * 12 * 16384 // count)
      self.assertGreaterEqual(note['barrier'][1], latest)

  @pytest.mark.soak
  def test_process_without_mpiexec_is_a_group_of_one(self):
    (note,) = self.run_ranks('move', None)
    self.assertEqual(note['who'], (0, 1, 'mpi', False, 1))
    self.assertEqual(note['gathered'], [programs.raw(programs.rows(0))])


@_needs_mpi
class FailuresTest(_RanksTestCase):
  @tiers.parameters(tiers.soak(2), 3)
  @pytest.mark.soak
  def test_disagreement_is_named_on_every_rank(self, count):
    notes = self.run_ranks('disagree', count)
    last = count - 1
    for what in programs.DISAGREEMENTS:
      first = notes[0][what]
      self.assertEqual(first[0], 'CollectiveMismatchError')
      self.assertIn('disagree on collective 2: rank 0 (task 0 at ', first[1])
      self.assertIn(f'; rank {last} (task {last} at ', first[1])
      self.assertEqual(first[2], (last,))
      for note in notes[1:]:
        self.assertEqual(note[what][:4], first[:4])
    self.assertIn("all_reduce(sum) 'a'", notes[0]['name'][1])
    self.assertIn("all_reduce(sum) 'b'", notes[0]['name'][1])

  @pytest.mark.soak
  def test_process_that_ends_is_named_at_once(self):
    _, notes, log = self.run_failing('leave', 3)
    self.assertContainsSubset([0, 2], sorted(notes), log)
    for other in (0, 2):
      name, message, _, rank, seconds = notes[other]['failure']
      self.assertEqual((name, rank), ('WorkerUnavailableError', 1), message)
      self.assertIn('left the group during', message)
      self.assertIn("rank 1's program has ended while others use", message)
      # Long before any deadline of the group.
      self.assertLess(seconds, 60)

  @pytest.mark.soak
  def test_stopped_process_is_named_and_the_job_ends(self):
    status, notes, log = self.run_failing('stop', 3)
    self.assertNotEqual(status, 0, log)
    self.assertEqual(sorted(notes), [0, 2], log)
    for note in notes.values():
      name, message, _, rank, _ = note['failure']
      self.assertEqual((name, rank), ('WorkerUnavailableError', 1), message)
      self.assertIn('silent for', message)

  def test_killed_process_ends_the_job(self):
    status, notes, log = self.run_failing('die', 3)
    self.assertNotEqual(status, 0, log)
    self.assertNotIn(1, notes)


class _World:
  rank, size = 0, 1

  def Ibarrier(self):
    return types.SimpleNamespace(Test=lambda: True)

  def Dup(self):
    return self


def _fake(**changes):
  """A module `mpi4py` whose MPI is in some state."""
  mpi = types.SimpleNamespace(
    Is_finalized=lambda: False,
    Is_initialized=lambda: True,
    Query_thread=lambda: 3,
    THREAD_MULTIPLE=3,
    COMM_WORLD=_World(),
  )
  vars(mpi).update(changes)
  module = types.ModuleType('mpi4py')
  module.MPI = mpi
  return mock.patch.dict(sys.modules, {'mpi4py': module, 'mpi4py.MPI': mpi})


class RefusalsTest(absltest.TestCase):
  def test_missing_mpi4py_names_the_extra(self):
    with (
      mock.patch.dict(sys.modules, {'mpi4py': None}),
      self.assertRaises(errors.UnsupportedOptionError) as caught,
    ):
      process_group.form_mpi_group()
    self.assertIn("pip install '.[mpi]'", str(caught.exception))

  def test_mpi_for_one_thread_is_refused(self):
    with (
      _fake(Query_thread=lambda: 1),
      self.assertRaises(errors.UnsupportedOptionError) as caught,
    ):
      process_group.form_mpi_group()
    self.assertIn('got thread level 1', str(caught.exception))
    self.assertIn('mpi4py.rc.thread_level', str(caught.exception))

  def test_mpi_that_is_over_is_refused(self):
    with (
      _fake(Is_finalized=lambda: True),
      self.assertRaises(errors.UnsupportedOptionError) as caught,
    ):
      process_group.form_mpi_group()
    self.assertIn(r'after MPI.Finalize()', str(caught.exception))


if __name__ == '__main__':
  absltest.main()

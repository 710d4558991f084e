"""Groups over MPI: real ranks under mpiexec, compared bit by bit."""

import importlib.util
import pathlib
import pickle
import shutil
import sys
import types
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests import tiers
from tests.process_group import conformance
from tests.process_group.mpi import programs
from tf_strategies import errors, process_group

_DEADLINE_SECONDS = 120


def _mpiexec():
  beside = pathlib.Path(sys.executable).with_name('mpiexec')
  return str(beside) if beside.exists() else shutil.which('mpiexec')


_needs_mpi = pytest.mark.skipif(
  importlib.util.find_spec('mpi4py') is None or _mpiexec() is None,
  reason="needs mpi4py and mpiexec: pip install '.[mpi]'",
)


class _RanksTestCase(parameterized.TestCase):
  def run_ranks(self, program, count):
    """Returns the notes of each rank. Checks that all ranks succeed."""
    status, notes, log = self.run_failing(program, count)
    self.assertEqual(status, 0, log)
    self.assertEqual(sorted(notes), list(range(count or 1)), log)
    return [notes[rank] for rank in sorted(notes)]

  def run_failing(self, program, count):
    """Returns the exit status, the notes by rank, and the log."""
    directory = self.create_tempdir().full_path
    command = [sys.executable, '-m', programs.__name__, program, directory]
    if count is not None:
      command = [_mpiexec(), '-n', str(count), *command]
    with processes.Command(
      command,
      name=program,
      env=processes.python_environment(),
      deadline_seconds=_DEADLINE_SECONDS,
    ) as run:
      status, log = run.wait(), run.output()
    notes = {
      int(path.stem): pickle.loads(path.read_bytes())
      for path in pathlib.Path(directory).glob('*.pickle')
    }
    return status, notes, log


@_needs_mpi
class CollectivesTest(_RanksTestCase):
  @tiers.parameters(tiers.soak(2), tiers.smoke(3), tiers.soak(4))
  def test_all_algorithms_sizes_and_dtypes(self, count):
    notes = dict(note['table'] for note in self.run_ranks('table', count))
    results = [notes[rank] for rank in range(count)]
    conformance.assert_results(self, results, large='direct')

  # None: without mpiexec, a process is a group of one.
  @tiers.parameters(tiers.soak(None), tiers.soak(2), 3, tiers.soak(4))
  def test_arrays_of_any_shape_reach_all_ranks(self, count):
    for rank, note in enumerate(self.run_ranks('move', count)):
      size = count or 1
      self.assertEqual(note['who'], (rank, size, 'mpi', False, 1))
      # The number of floats is a multiple of each of these counts.
      self.assertEqual(note['sent'], 2 * (size - 1) * 12 * 16384 // size)


@_needs_mpi
class FailuresTest(_RanksTestCase):
  @tiers.parameters(tiers.soak(2), 3)
  @pytest.mark.soak
  def test_mismatch_is_reported_on_every_rank(self, count):
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
    self.assertIn("all_reduce 'a'", notes[0]['name'][1])
    self.assertIn("all_reduce 'b'", notes[0]['name'][1])

  @parameterized.parameters(
    ('leave', 'left the group during', "rank 1's program has ended while oth"),
    ('stop', 'silent for'),
  )
  @pytest.mark.soak
  def test_process_that_ends_or_stops_is_named(self, program, *words):
    status, notes, log = self.run_failing(program, 3)
    self.assertContainsSubset([0, 2], sorted(notes), log)
    if program == 'stop':
      self.assertNotEqual(status, 0, log)
      self.assertNotIn(1, notes)
    for other in (0, 2):
      name, message, _, rank, seconds = notes[other]['failure']
      self.assertEqual((name, rank), ('WorkerUnavailableError', 1), message)
      for text in words:
        self.assertIn(text, message)
      # Well before the group's deadlines.
      self.assertLess(seconds, 60)

  def test_killed_process_ends_the_job(self):
    status, notes, log = self.run_failing('die', 3)
    self.assertNotEqual(status, 0, log)
    self.assertNotIn(1, notes)


def _fake(**changes):
  """Returns the modules of a fake `mpi4py`."""
  mpi = types.SimpleNamespace(
    Is_finalized=lambda: False,
    Is_initialized=lambda: True,
    Query_thread=lambda: 3,
    THREAD_MULTIPLE=3,
  )
  vars(mpi).update(changes)
  module = types.ModuleType('mpi4py')
  module.MPI = mpi
  return {'mpi4py': module, 'mpi4py.MPI': mpi}


class RefusalsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('missing', {'mpi4py': None}, r"pip install '\.\[mpi\]'"),
    (
      'one_thread',
      _fake(Query_thread=lambda: 1),
      r'got thread level 1.*mpi4py\.rc\.thread_level',
    ),
    (
      'finalized',
      _fake(Is_finalized=lambda: True),
      r'after MPI\.Finalize\(\)',
    ),
  )
  def test_unusable_mpi_is_refused(self, modules, message):
    with (
      mock.patch.dict(sys.modules, modules),
      self.assertRaisesRegex(errors.UnsupportedOptionError, message),
    ):
      process_group.form_mpi_group()


if __name__ == '__main__':
  absltest.main()

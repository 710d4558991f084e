"""Damaged checkpoints, processes killed during a save, owners, and positions."""

import errno
import itertools
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import time
import weakref
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from benchmarks import processes
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer, ownership
from tf_strategies.checkpoint.position import Position

_DEADLINE_SECONDS = 60


def _truncate(path):
  os.truncate(path, os.path.getsize(path) // 2)


def _flip(path):
  content = bytearray(pathlib.Path(path).read_bytes())
  content[len(content) // 2] ^= 1
  pathlib.Path(path).write_bytes(content)


def _renumber(path):
  """Changes a value in the manifest, which stays readable."""
  path = pathlib.Path(path)
  manifest = json.loads(path.read_text(encoding='utf-8'))
  manifest['contents']['metadata']['number'] += 1
  path.write_text(json.dumps(manifest), encoding='utf-8')


def _nest(path):
  pathlib.Path(path).write_bytes(b'[' * 100_000)


_FILES = ('manifest.json', 'arrays.bin')


class _StoreTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = os.path.join(self.create_tempdir(), 'checkpoints')
    self.store = checkpointer.Checkpointer(self.directory)
    self.addCleanup(lambda: self.store.release())


class CheckpointerTest(_StoreTest):
  def _listed(self):
    """Returns the names in the directory, except the owner file."""
    return set(os.listdir(self.directory)) - {'owner.json'}

  def _save(self, number):
    arrays = {'a': number * 1000 + np.arange(100), 'b': np.float32(number)}
    return self.store.save(arrays.items(), {'number': number})

  @pytest.mark.smoke
  def test_saved_arrays_and_metadata_are_read_back(self):
    arrays = {
      'layer/kernel': np.arange(6, dtype=np.float32).reshape(2, 3),
      'scalar': np.asarray(7, np.int64),
      'none': np.zeros([0, 3], np.float16),
      'flag': np.asarray([True, False]),
      'half': np.asarray([1.5, -2], tf.bfloat16.as_numpy_dtype),
      # Not contiguous.
      'transposed': np.arange(6).reshape(2, 3).T,
    }
    self.assertIsNone(self.store.newest())
    path = self.store.save(arrays.items(), {'epoch': 3, 'more': [1, None]})
    found = self.store.newest()
    self.assertEqual(found.path, path)
    self.assertEqual(found.metadata, {'epoch': 3, 'more': [1, None]})
    self.assertEqual(list(found.arrays), list(arrays))
    for name, array in arrays.items():
      self.assertEqual(found.arrays[name].dtype, array.dtype, name)
      np.testing.assert_array_equal(found.arrays[name], array, name)

  def test_only_one_array_is_held_in_memory(self):
    made = []

    def pairs():
      for number in range(5):
        array = np.full([1000], number)
        made.append(weakref.ref(array))
        yield f'a{number}', array
        del array
        # Only the array that was just written may still exist.
        self.assertEmpty([a for a in made[:-1] if a() is not None])

    self.store.save(pairs(), {})
    self.assertLen(made, 5)
    found = self.store.newest()
    self.assertEqual([a[0] for a in found.arrays.values()], list(range(5)))

  def test_rows_of_saved_blocks_are_read(self):
    whole = np.arange(40, dtype=np.float32).reshape(10, 4)
    blocks = checkpointer.Blocks('float32', (10, 4), np.split(whole, [3, 7]))
    self.store.save([('small', np.arange(3)), ('table', blocks)], {})
    found = self.store.newest().arrays
    np.testing.assert_array_equal(found['table'], whole)
    for first, end in itertools.combinations(range(11), 2):
      some = found.rows('table', first, end - first)
      np.testing.assert_array_equal(some, whole[first:end])
    np.testing.assert_array_equal(found.rows('small', 1, 1), [1])

  def test_open_arrays_outlive_their_checkpoint(self):
    self._save(1)
    found = self.store.newest().arrays
    found = found.with_specs({'model/a': found.specs['a']})
    for number in range(2, 5):
      self._save(number)
    self.assertEqual(found.specs['model/a'].shape, (100,))
    self.assertEqual(found['model/a'].tolist(), list(range(1000, 1100)))

  @parameterized.parameters(
    *itertools.product((_flip, os.remove), _FILES),
    *((damage, 'manifest.json') for damage in (_nest, _renumber)),
  )
  def test_damaged_checkpoint_is_skipped(self, damage, file):
    before, damaged = self._save(1), self._save(2)
    damage(os.path.join(damaged, file))
    with self.assertLogs(level='WARNING') as logs:
      found = self.store.newest()
    self.assertEqual(found.path, before)
    self.assertEqual(found.arrays['a'].tolist(), list(range(1000, 1100)))
    skipped, used = logs.output
    self.assertIn(damaged, skipped)
    self.assertIn(file, skipped)
    self.assertIn(before, used)
    # The old checkpoint is kept until another complete one exists.
    path = self._save(3)
    self.assertEqual(self.store.paths(), [before, damaged, path])
    self.assertEqual(self.store.newest().path, path)
    newest = self._save(4)
    self.assertEqual(self.store.paths(), [path, newest])

  def test_only_damaged_checkpoints_raise_and_are_kept(self):
    paths = [self._save(number) for number in (1, 2)]
    for path in paths:
      _truncate(os.path.join(path, 'arrays.bin'))
    before = self._files()
    with (
      self.assertLogs(level='WARNING') as logs,
      self.assertRaises(errors.DataError) as caught,
    ):
      self.store.newest()
    self.assertLen(logs.output, 2)
    for path in paths:
      self.assertRegex(str(caught.exception), f'{path}: .*arrays.bin')
    self.assertIn('delete the directory', str(caught.exception))
    self.assertEqual(self._files(), before)

  def _files(self):
    return sorted(pathlib.Path(self.directory).rglob('*'))

  @parameterized.parameters(*_FILES)
  def test_unreadable_file_raises(self, file):
    self._save(1)
    path = os.path.join(self._save(2), file)

    def fail(name, *args, **options):
      if name == path:
        raise OSError(errno.EIO, 'disk error', name)
      return open(name, *args, **options)

    # The checkpoint may be complete, so an older one must not be used.
    with (
      mock.patch.object(checkpointer, 'open', fail, create=True),
      self.assertRaisesRegex(errors.StorageError, f'cannot be read.*{file}'),
    ):
      self.store.newest()

  def test_checkpoint_of_another_format_is_skipped(self):
    self._save(1)
    with mock.patch.object(checkpointer, '_FORMAT', 99):
      self._save(2)
    with self.assertLogs(level='WARNING') as logs:
      self.assertEqual(self.store.newest().metadata['number'], 1)
    self.assertIn('format 99, expected 4', logs.output[0])

  @parameterized.parameters('mkdir', 'fsync', 'rename')
  def test_failed_save_keeps_other_checkpoints(self, step):
    paths = [self._save(1), self._save(2)]
    with (
      mock.patch.object(
        os, step, side_effect=OSError(errno.ENOSPC, 'disk full')
      ),
      self.assertRaisesRegex(
        errors.StorageError, 'cannot be written: .*disk full.*Fix'
      ) as caught,
    ):
      self._save(3)
    self.assertEqual(caught.exception.errno, errno.ENOSPC)
    self.assertEqual(self.store.paths(), paths)
    self.assertEqual(self.store.newest().metadata['number'], 2)
    # The next save deletes the incomplete files.
    path = self._save(4)
    self.assertEqual(
      sorted(self._listed()),
      [os.path.basename(p) for p in (paths[1], path)],
    )

  def test_undeletable_remains_do_not_block_a_save(self):
    """Simulates a late server that still writes into the directory."""
    with (
      mock.patch.object(os, 'rename', side_effect=OSError(errno.EIO, 'no')),
      self.assertRaises(errors.StorageError),
    ):
      self._save(1)
    (remains,) = self._listed()
    with mock.patch.object(checkpointer.shutil, 'rmtree'):
      self._save(1)
    self.assertEqual(self.store.newest().metadata['number'], 1)
    self._save(2)
    self.assertNotIn(remains, self._listed())

  @parameterized.parameters(
    ('gs://a', 2, "'gs://a'"), ('here', 0, 'max_to_keep=0')
  )
  def test_invalid_arguments_are_refused(self, directory, number, words):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, words):
      checkpointer.Checkpointer(directory, number)


# Saves repeatedly in a child process that kills itself before its n-th file
# operation, for n = 1, 2, ..., until a save completes. Prints after each save: whether
# the child was killed, the number of the newest checkpoint before and after, whether
# its arrays have that value, whether no checkpoint was skipped, the number of
# checkpoints, and whether the directory still has its owner file.
_KILLED_AT_EACH_STEP = """
import builtins, itertools, json, os, signal, sys
import numpy as np
from tf_strategies.checkpoint import checkpointer

store = checkpointer.Checkpointer(sys.argv[1])

def save(number, last=0):
  steps = itertools.count(1)

  def step():
    if next(steps) == last:
      os.kill(os.getpid(), signal.SIGKILL)

  def counted(function):
    def call(*args, **options):
      step()
      return function(*args, **options)
    return call

  def pairs():
    for i in range(3):
      step()
      yield f'a{i}', np.full(5000, number)

  if last:
    for name in ('mkdir', 'fsync', 'rename', 'unlink', 'rmdir', 'open',
                 'pwrite', 'ftruncate'):
      setattr(os, name, counted(getattr(os, name)))
    checkpointer.open = counted(builtins.open)
  store.save(pairs(), {'number': number})

save(1)
save(2)
store.release()
for last in itertools.count(1):
  before = store.newest().metadata['number']
  child = os.fork()
  if not child:
    save(before + 1, last)
    os._exit(0)
  is_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
  found = store.newest()
  after = found.metadata['number']
  is_right = all((a == after).all() for a in found.arrays.values())
  with open(os.path.join(sys.argv[1], 'owner.json')) as f:
    is_owned = f.read().startswith('{"run": "run"')
  print(json.dumps([is_killed, before, after, is_right, found.path == store.paths()[-1],
                    len(store.paths()), is_owned]), flush=True)
  if not is_killed:
    break
"""


class KilledAtEachStepTest(absltest.TestCase):
  """SIGKILL before each file operation."""

  @pytest.mark.smoke
  def test_newest_checkpoint_is_always_complete(self):
    done = processes.run_python(
      '-c',
      _KILLED_AT_EACH_STEP,
      self.create_tempdir().full_path,
      env={**os.environ, 'TFS_RUN_ID': 'run'},
      deadline_seconds=_DEADLINE_SECONDS,
      is_checked=True,
    )
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    self.assertGreater(len(rounds), 12)
    for is_killed, before, after, is_right, is_newest, paths, owned in rounds:
      self.assertTrue(owned)
      self.assertIn(after, (before, before + 1))
      self.assertTrue(is_right)
      self.assertTrue(is_newest)
      self.assertBetween(paths, 2, 3)
      self.assertTrue(is_killed or after == before + 1)
    # Some killed saves had already been renamed, most had not.
    saved = [after > before for is_killed, before, after, *_ in rounds[:-1]]
    self.assertIn(True, saved)
    self.assertGreater(saved.count(False), 8)
    self.assertFalse(rounds[-1][0])


# Saves, forks, prints the pid of the child, and sleeps.
_OWNER = """
import os, sys, time
import numpy as np
from tf_strategies.checkpoint import checkpointer
store = checkpointer.Checkpointer(sys.argv[1])
store.save([('a', np.arange(3))], {})
child = os.fork()
if child:
  print(child, flush=True)
time.sleep(60)
"""


class OwnerTest(_StoreTest):
  """A directory has only one writer."""

  def setUp(self):
    super().setUp()
    self.owner = pathlib.Path(self.directory, 'owner.json')

  def record(self):
    return json.loads(self.owner.read_text(encoding='utf-8'))

  def start_as(self, run):
    """Makes this process the owner, as part of a new run."""
    self.store.release()
    self.enter_context(mock.patch.dict(os.environ, {'TFS_RUN_ID': run}))
    self.store = checkpointer.Checkpointer(self.directory)
    self.store.acquire()

  def save(self):
    self.store.save([('a', np.arange(3))], {})

  def test_directory_is_locked_until_its_owner_dies(self):
    with processes.Command(
      [sys.executable, '-c', _OWNER, self.directory],
      env=processes.python_environment({'TFS_RUN_ID': 'first'}),
      deadline_seconds=_DEADLINE_SECONDS,
    ) as owner:
      owner.wait_until(lambda: owner.output().strip())
      before = self.store.paths()
      with (
        mock.patch.object(ownership, '_OTHER_RUN_SECONDS', 0.5),
        self.assertRaisesRegex(
          errors.InUseError,
          f'run first .process {owner.pid} on {socket.gethostname()}, since .*Fix',
        ),
      ):
        self.save()
      self.assertEqual(self.store.paths(), before)
      # The forked child is still alive and has the same open files.
      self.assertEqual(owner.kill(), -signal.SIGKILL)
      child = int(owner.output())
      self.addCleanup(os.kill, child, signal.SIGKILL)
      os.kill(child, 0)
      began = time.monotonic()
      self.save()
      self.assertLess(time.monotonic() - began, 5)

  def test_newest_process_is_the_owner_without_file_locks(self):
    self.enter_context(
      mock.patch.object(
        ownership.fcntl, 'flock', side_effect=OSError(errno.ENOLCK, 'none')
      )
    )
    self.start_as('a')
    self.save()
    other = {**self.record(), 'process': 'other', 'run': 'b', 'host': 'far'}
    self.owner.write_text(json.dumps(other), encoding='utf-8')
    with self.assertRaisesRegex(errors.TakenOverError, 'run b .* on far'):
      self.save()

  def test_full_disk_keeps_the_owner_file(self):
    self.start_as('a-run-with-a-long-name')
    self.save()
    self.store.release()
    record = self.record()
    full = OSError(errno.ENOSPC, 'No space left on device')
    with (
      mock.patch.object(ownership.os, 'pwrite', side_effect=full),
      self.assertRaises(errors.StorageError),
    ):
      self.start_as('b')
    self.assertEqual(self.record(), record)
    # A shorter record replaces it.
    self.start_as('b')
    self.assertEqual(self.record()['run'], 'b')

  def test_deleted_directory_is_created_and_owned_again(self):
    self.start_as('a')
    self.save()
    shutil.rmtree(self.directory)
    self.save()
    self.assertLen(self.store.paths(), 1)
    other = checkpointer.Checkpointer(self.directory)
    other.acquire()  # This is the same process.


# These return functions, since creating a dataset at import would fix the devices of
# the process. Other test modules need eight devices.


def _range(count):
  return lambda: tf.data.Dataset.range(count)


def _unknown(count):
  """Returns a function that creates a dataset of unknown length."""
  return lambda: tf.data.Dataset.range(count).filter(lambda x: x >= 0)


class PositionTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('pass', _range(10), Position(4, 3), None, 3),
    ('epochs', _range(40), Position(2, 3), 10, 23),
    ('infinite', tf.data.Dataset.counter, Position(2, 3), 10, 23),
    ('unknown', _unknown(40), Position(2, 3), 10, 23),
    # Two passes over the data and three batches.
    ('unknown_passes', _unknown(10), Position(2, 3), 10, 3),
    ('unknown_end_of_a_pass', _unknown(10), Position(2), 10, 0),
  )
  def test_iteration_starts_at_the_position(
    self, make, position, steps, expected
  ):
    self.assertEqual(int(next(position.iterate(make(), steps))), expected)

  def test_empty_data(self):
    self.assertEmpty(list(Position(0, 3).iterate(_unknown(0)())))

  def test_order_and_json(self):
    positions = [Position(), Position(0, 7), Position(1), Position(1, 2)]
    self.assertEqual(sorted([*positions[2:], *positions[:2]]), positions)
    position = Position(1, 2, (3, 4))
    self.assertEqual(
      Position.from_json({**position.to_json(), 'settings': {}}), position
    )
    self.assertEqual(
      Position.from_json({'epoch': 1, 'step': 2}), Position(1, 2)
    )
    self.assertEqual(tuple(position), (1, 2))


if __name__ == '__main__':
  absltest.main()

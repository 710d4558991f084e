"""Checkpoints that are damaged or killed while they are written, and positions."""

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
  """Changes a value, which leaves the manifest readable."""
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
    self.directory = os.path.join(
      self.create_tempdir().full_path, 'checkpoints'
    )
    self.store = checkpointer.Checkpointer(self.directory)
    self.addCleanup(lambda: self.store.release())


class CheckpointerTest(_StoreTest):
  def _listed(self):
    """Returns the names in the directory, except the file that names the owner."""
    return set(os.listdir(self.directory)) - {'owner.json'}

  def _save(self, number):
    arrays = {'a': number * 1000 + np.arange(100), 'b': np.float32(number)}
    return self.store.save(arrays.items(), {'number': number})

  @pytest.mark.smoke
  def test_returns_what_was_saved(self):
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

  def test_pairs_are_written_one_after_the_other(self):
    made = []

    def pairs():
      for number in range(5):
        array = np.full([1000], number)
        made.append(weakref.ref(array))
        yield f'a{number}', array
        del array
        # The one that was just written may still be there, and no other.
        self.assertEmpty([a for a in made[:-1] if a() is not None])

    self.store.save(pairs(), {})
    self.assertLen(made, 5)
    found = self.store.newest()
    self.assertEqual([a[0] for a in found.arrays.values()], list(range(5)))

  def test_blocks(self):
    whole = np.arange(40, dtype=np.float32).reshape(10, 4)
    blocks = checkpointer.Blocks('float32', (10, 4), np.split(whole, [3, 7]))
    self.store.save([('small', np.arange(3)), ('table', blocks)], {})
    found = self.store.newest().arrays
    np.testing.assert_array_equal(found['table'], whole)
    for first, end in itertools.combinations(range(11), 2):
      some = found.rows('table', first, end - first)
      np.testing.assert_array_equal(some, whole[first:end])
    np.testing.assert_array_equal(found.rows('small', 1, 1), [1])

  def test_arrays_outlive_their_checkpoint(self):
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
  def test_torn_checkpoint_is_skipped(self, damage, file):
    before, torn = self._save(1), self._save(2)
    damage(os.path.join(torn, file))
    with self.assertLogs(level='WARNING') as logs:
      found = self.store.newest()
    self.assertEqual(found.path, before)
    self.assertEqual(found.arrays['a'].tolist(), list(range(1000, 1100)))
    skipped, used = logs.output
    self.assertIn(torn, skipped)
    self.assertIn(file, skipped)
    self.assertIn(before, used)
    # Beside the next one, the older one is still the only whole one.
    path = self._save(3)
    self.assertEqual(self.store.paths(), [before, torn, path])
    self.assertEqual(self.store.newest().path, path)
    newest = self._save(4)
    self.assertEqual(self.store.paths(), [path, newest])

  def test_nothing_is_whole(self):
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
  def test_file_that_cannot_be_read_now(self, file):
    self._save(1)
    path = os.path.join(self._save(2), file)

    def fail(name, *args, **options):
      if name == path:
        raise OSError(errno.EIO, 'a fault of the disk', name)
      return open(name, *args, **options)

    # It may be whole: neither the one before it nor none will do.
    with (
      mock.patch.object(checkpointer, 'open', fail, create=True),
      self.assertRaisesRegex(errors.StorageError, f'cannot be read.*{file}'),
    ):
      self.store.newest()

  def test_manifest_of_another_format(self):
    self._save(1)
    with mock.patch.object(checkpointer, '_FORMAT', 99):
      self._save(2)
    with self.assertLogs(level='WARNING') as logs:
      self.assertEqual(self.store.newest().metadata['number'], 1)
    self.assertIn('format 99, expected 4', logs.output[0])

  @parameterized.parameters('mkdir', 'fsync', 'rename')
  def test_save_that_fails_leaves_the_others(self, step):
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
    # The next save deletes its remains.
    path = self._save(4)
    self.assertEqual(
      sorted(self._listed()),
      [os.path.basename(p) for p in (paths[1], path)],
    )

  def test_what_is_left_and_cannot_be_deleted_is_in_nobodys_way(self):
    """A server that is late writes into it, say."""
    with (
      mock.patch.object(os, 'rename', side_effect=OSError(errno.EIO, 'no')),
      self.assertRaises(errors.StorageError),
    ):
      self._save(1)
    (left,) = self._listed()
    with mock.patch.object(checkpointer.shutil, 'rmtree'):
      self._save(1)
    self.assertEqual(self.store.newest().metadata['number'], 1)
    self._save(2)
    self.assertNotIn(left, self._listed())

  @parameterized.parameters(
    ('gs://a', 2, "'gs://a'"), ('here', 0, 'max_to_keep=0')
  )
  def test_what_cannot_be_is_refused(self, directory, number, words):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, words):
      checkpointer.Checkpointer(directory, number)


# Saves again and again in a child process that kills itself before its n-th
# operation on files, for n = 1, 2, ..., until it comes to its end. Prints after
# each: whether it was killed, the numbers of the newest checkpoint before and
# after, whether its arrays are that number, whether none was skipped, how many are
# there, and whether the directory still has its owner's record.
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
  """SIGKILL before each operation on files."""

  @pytest.mark.smoke
  def test_what_is_there_is_whole(self):
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
    # Of those that were killed, some had just renamed theirs, most had not.
    saved = [after > before for is_killed, before, after, *_ in rounds[:-1]]
    self.assertIn(True, saved)
    self.assertGreater(saved.count(False), 8)
    self.assertFalse(rounds[-1][0])


# Saves, starts a copy of itself by a fork, says so, and does nothing more.
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
  """A directory has one writer."""

  def setUp(self):
    super().setUp()
    self.owner = pathlib.Path(self.directory, 'owner.json')

  def record(self):
    return json.loads(self.owner.read_text(encoding='utf-8'))

  def start_as(self, run):
    """Makes this process one of a run that has just begun."""
    self.store.release()
    self.enter_context(mock.patch.dict(os.environ, {'TFS_RUN_ID': run}))
    self.store = checkpointer.Checkpointer(self.directory)
    self.store.acquire()

  def save(self):
    self.store.save([('a', np.arange(3))], {})

  def test_live_writer_keeps_others_out_and_a_killed_one_does_not(self):
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
      # Its copy lives on, and has the same open files.
      self.assertEqual(owner.kill(), -signal.SIGKILL)
      child = int(owner.output())
      self.addCleanup(os.kill, child, signal.SIGKILL)
      os.kill(child, 0)
      began = time.monotonic()
      self.save()
      self.assertLess(time.monotonic() - began, 5)

  def test_without_locks_the_newest_process_is_the_owner(self):
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

  def test_full_disk_leaves_the_record_of_the_owner(self):
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
    # A shorter record takes its place.
    self.start_as('b')
    self.assertEqual(self.record()['run'], 'b')

  def test_directory_that_was_deleted_is_owned_again(self):
    self.start_as('a')
    self.save()
    shutil.rmtree(self.directory)
    self.save()
    self.assertLen(self.store.paths(), 1)
    other = checkpointer.Checkpointer(self.directory)
    other.acquire()  # The same process.


# Functions that make data sets, in the tests: an op that runs when a module is
# imported fixes the devices of the process, of which other modules want eight.


def _range(count):
  return lambda: tf.data.Dataset.range(count)


def _unknown(count):
  """Returns a function that makes a dataset whose length TensorFlow cannot know."""
  return lambda: tf.data.Dataset.range(count).filter(lambda x: x >= 0)


class PositionTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('pass', _range(10), Position(4, 3), None, 3),
    ('epochs', _range(40), Position(2, 3), 10, 23),
    ('infinite', tf.data.Dataset.counter, Position(2, 3), 10, 23),
    ('unknown', _unknown(40), Position(2, 3), 10, 23),
    # Two passes and three batches.
    ('unknown_passes', _unknown(10), Position(2, 3), 10, 3),
    ('unknown_end_of_a_pass', _unknown(10), Position(2), 10, 0),
  )
  def test_iterates_from_there(self, make, position, steps, expected):
    self.assertEqual(int(next(position.iterate(make(), steps))), expected)

  def test_data_of_which_nothing_is_there(self):
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

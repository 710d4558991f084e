"""Pieces of tables are written, read, checked, and put together."""

import itertools
import os

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer, pieces

# Rows tell their place.
_WHOLE = np.arange(40, dtype=np.float32).reshape(10, 4)


class PiecesTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.store = checkpointer.Checkpointer(self.directory)

  def table(self, directory, value=_WHOLE, cuts=(0, 3, 7, 10), name='t'):
    found = tuple(
      pieces.write(directory, f'{name}-{a}', a, tf.constant(value[a:b]))
      for a, b in itertools.pairwise(cuts)
    )
    return pieces.Table('float32', value.shape, found)

  def save(self, value=_WHOLE, name='t'):
    return self.store.save(
      {'small': np.arange(3)},
      {'steps': 1},
      lambda d: {'table': self.table(d, value, name=name)},
    )

  @pytest.mark.smoke
  def test_a_checkpoint_has_them_as_arrays(self):
    self.save()
    found = self.store.newest().arrays
    self.assertEqual(set(found), {'small', 'table'})
    self.assertEqual(found.specs['table'].shape, (10, 4))
    self.assertAllEqual(found['table'], _WHOLE)
    self.assertAllEqual(found['small'], np.arange(3))
    self.assertAllEqual(found.rows('table', 2, 5), _WHOLE[2:7])
    self.assertAllEqual(found.rows('small', 1, 1), [1])
    renamed = found.renamed({'table': 'other'})
    self.assertAllEqual(renamed['other'], _WHOLE)
    self.assertEqual(set(renamed), {'small', 'other'})

  def test_rows(self):
    table = self.table(self.directory)
    for first, end in itertools.combinations(range(11), 2):
      some = pieces.array_of(self.directory, table, first, end - first)
      self.assertAllEqual(some, _WHOLE[first:end])

  def test_a_data_file_has_the_bytes_alone(self):
    table = self.table(self.directory)
    data = os.path.join(self.directory, table.files()[2])
    self.assertAllEqual(np.fromfile(data, np.float32), _WHOLE[3:7].ravel())

  @parameterized.parameters(
    (0, 'cut'), (0, 'flip'), (1, 'flip'), (1, 'delete'), (0, 'other')
  )
  def test_damage_costs_the_newest_checkpoint(self, suffix, kind):
    older = self.save()
    newer = self.save(_WHOLE + 1, 'u')
    path = os.path.join(newer, 'u-3' + pieces._SUFFIXES[suffix])
    with open(path, 'r+b') as f:
      if kind == 'cut':
        f.truncate(os.path.getsize(path) // 2)
      elif kind == 'flip':
        f.seek(os.path.getsize(path) // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    if kind == 'delete':
      os.remove(path)
    if kind == 'other':  # Whole files, of other rows.
      for end in pieces._SUFFIXES:
        os.remove(os.path.join(newer, 'u-3' + end))
        os.link(
          os.path.join(older, 't-3' + end), os.path.join(newer, 'u-3' + end)
        )
    with self.assertLogs(level='WARNING') as logs:
      found = self.store.newest()
    self.assertEqual(found.path, older)
    self.assertIn('u-3', logs.output[0])
    self.assertAllEqual(found.arrays['table'], _WHOLE)

  def test_a_file_that_cannot_be_written(self):
    """Checks that earlier checkpoints stay, as after any failed write."""
    before = self.save()
    with self.assertRaisesRegex(errors.StorageError, 'cannot be written.*Fix'):
      self.store.save({}, {}, lambda d: {'table': self.table(d + '/no')})
    self.assertEqual(self.store.newest().path, before)


if __name__ == '__main__':
  tf.test.main()

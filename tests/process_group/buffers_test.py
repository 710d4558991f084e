import numpy as np
from absl.testing import absltest, parameterized

from tf_strategies.process_group import buffers


class PoolTest(parameterized.TestCase):
  @parameterized.parameters(((0,), 'f4'), ((3, 5), 'i8'), ((), 'u1'))
  def test_arrays_are_aligned(self, shape, dtype):
    made = buffers.Pool().take(shape, dtype)
    self.assertEqual(made.shape, shape)
    self.assertEqual(made.dtype, dtype)
    self.assertEqual(made.ctypes.data % 64, 0)
    self.assertTrue(made.flags.c_contiguous and made.flags.writeable)

  @parameterized.named_parameters(
    ('itself', lambda a: a),
    ('slice', lambda a: a[5:7]),
    ('reshaped', lambda a: a.reshape(10, 10).T),
    ('other_dtype', lambda a: a.view(np.uint8)[3:]),
    ('memoryview', lambda a: memoryview(a)),
  )
  def test_memory_in_use_is_not_given_out_again(self, hold):
    pool = buffers.Pool()
    array = pool.take(100, 'f4')
    place = array.ctypes.data
    held = hold(array)
    del array
    other = pool.take(100, 'f4')
    self.assertNotEqual(other.ctypes.data, place)
    del held
    self.assertEqual(pool.take(100, 'f4').ctypes.data, place)

  def test_what_is_kept_is_bounded(self):
    pool = buffers.Pool(max_bytes=10_000)
    arrays = [pool.take(4096, 'u1') for _ in range(5)]
    places = {a.ctypes.data for a in arrays}
    self.assertLen(places, 5)
    newest = arrays[-1].ctypes.data
    del arrays
    self.assertEqual(pool.take(4096, 'u1').ctypes.data, newest)
    self.assertLessEqual(sum(b.size for b in pool._blocks), 10_000)

  def test_small_array_does_not_take_large_memory(self):
    pool = buffers.Pool()
    large = pool.take(1 << 20, 'u1').ctypes.data
    self.assertNotEqual(pool.take(10, 'u1').ctypes.data, large)


if __name__ == '__main__':
  absltest.main()

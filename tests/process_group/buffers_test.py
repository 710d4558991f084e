import numpy as np
from absl.testing import absltest, parameterized

from tf_strategies.process_group import buffers


class PoolTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('itself', lambda a: a),
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


if __name__ == '__main__':
  absltest.main()

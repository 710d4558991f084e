"""The links between devices follow from TensorFlow's device lists."""

import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import fake_gpus
from tf_strategies.cross_device import links

virtual_devices.configure()

A100 = 'NVIDIA A100-SXM4-40GB'
CARD = 'NVIDIA H100 PCIe'


class OwnersTest(tf.test.TestCase):
  def test_parts_are_numbered_through_all_gpus(self):
    with fake_gpus.machine(1, 3, 2):
      found = links.owners(fake_gpus.names(7))
    numbers = [name and int(name[-1]) for name in found]
    self.assertEqual(numbers, [0, 1, 1, 1, 2, 2, None])

  def test_cpus_and_names_that_are_not_known_yet_have_none(self):
    with fake_gpus.machine(1):
      self.assertEqual(links.owners(['CPU:0', '', 'GPU:1']), [None] * 3)
      self.assertLen(set(links.owners(['GPU:0', 'gpu:0'])), 1)


class NcclIsUsableTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ('one_gpu', (1,), 1, True),
    ('two_parts', (2,), 2, False),
    ('more_than_there_are', (1,), 2, False),
    ('whole_one_beside_parts', (1, 4), 1, True),
  )
  def test_only_on_whole_gpus(self, parts, count, expected):
    with fake_gpus.machine(*parts):
      found = links.nccl_is_usable(fake_gpus.names(count))
    self.assertEqual(found, expected)

  def test_not_beside_a_cpu(self):
    with fake_gpus.machine(1, 1):
      self.assertFalse(links.nccl_is_usable(['GPU:0', 'GPU:1', 'CPU:0']))
      self.assertFalse(links.nccl_is_usable(['GPU:0', '']))


class NameTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ('parts_of_two', (2, 2), CARD, 4, 'pcie'),
    ('first_two_parts', (2, 2), CARD, 2, 'one_gpu'),
    ('cards', (1, 1), CARD, 2, 'pcie'),
    ('h200', (1, 1), 'NVIDIA H200', 2, 'nvlink'),
    ('unknown', (1, 1), '', 2, 'pcie'),
  )
  def test_of_gpus(self, parts, device_name, count, expected):
    with fake_gpus.machine(*parts, device_name=device_name):
      self.assertEqual(links.name_of(fake_gpus.names(count)), expected)

  def test_topology_has_that_link(self):
    for device_name, name in ((A100, 'nvlink'), (CARD, 'pcie')):
      with fake_gpus.machine(1, 1, 1, device_name=device_name):
        found = links.topology(fake_gpus.names(3))
      self.assertEqual(found.world_size, 3)
      self.assertEqual(found.link(0, 2), links.LINKS[name])


if __name__ == '__main__':
  tf.test.main()

"""`AutoAllReduce` chooses the best algorithm for the devices and the size."""

import contextlib
import math
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import nccl, processes, tf_case, virtual_devices
from tests.cross_device import fake_gpus, replicas
from tf_strategies import _tf_internal, cross_device, errors
from tf_strategies.cross_device import auto, base, executor, links

virtual_devices.configure()


gpus = fake_gpus.names
CARD = 'NVIDIA H100 PCIe'


class ScheduleTest(tf_case.TestCase):
  @pytest.mark.smoke
  def test_schedule_depends_on_the_link(self):
    # Over NVLink, fewer rounds are still better than fewer bytes.
    by_link = []
    for device_name in (CARD, 'NVIDIA H200'):
      with fake_gpus.machine(*[1] * 5, device_name=device_name):
        schedule = auto.AutoAllReduce().schedule(gpus(5), 4_000_000)
      by_link.append(schedule.num_rounds)
    self.assertGreater(*by_link)

  def test_tensors_are_only_cut_between_gpus(self):
    op = auto.AutoAllReduce()
    with fake_gpus.machine(1, 1, 1, 1):
      self.assertEqual(op._cut_above([virtual_devices.HOST] * 2), math.inf)
      self.assertLess(op._cut_above(gpus(4)), 1e6)


class LinksTest(tf_case.TestCase):
  """Links between devices, derived from TensorFlow's lists of devices."""

  @parameterized.named_parameters(
    ('one_gpu', (1,), gpus(1), True),
    ('two_virtual_gpus', (2,), gpus(2), False),
    ('missing_gpu', (1,), gpus(2), False),
    ('whole_gpu_with_virtual_gpus', (1, 4), gpus(1), True),
    ('with_cpu', (1, 1), ['GPU:0', 'GPU:1', 'CPU:0'], False),
    ('with_unknown_device', (1, 1), ['GPU:0', ''], False),
  )
  def test_nccl_is_used_only_on_whole_gpus(self, parts, devices, expected):
    with fake_gpus.machine(*parts):
      self.assertEqual(links.nccl_is_usable(devices), expected)

  @parameterized.named_parameters(
    ('virtual_gpus_of_two', (2, 2), CARD, 4, 'pcie'),
    ('virtual_gpus_of_one', (2, 2), CARD, 2, 'one_gpu'),
    ('cards', (1, 1), CARD, 2, 'pcie'),
    ('a100', (1, 1), 'NVIDIA A100-SXM4-40GB', 2, 'nvlink'),
    ('h200', (1, 1), 'NVIDIA H200', 2, 'nvlink'),
    ('unknown', (1, 1), '', 2, 'pcie'),
  )
  def test_name_of_link(self, parts, device_name, count, expected):
    with fake_gpus.machine(*parts, device_name=device_name):
      self.assertEqual(links.name_of(gpus(count)), expected)


class OneGpuTest(tf_case.TestCase):
  """Between virtual GPUs of one GPU, even a small copy takes 34 us."""

  def graph_of(self, op, world_size, shapes):
    """Returns the graph of an all-reduce between virtual GPUs of a simulated GPU."""

    @tf.function
    def all_reduce(rows):
      reduced = replicas.all_reduced(op, replicas.SUM, rows, gpus(world_size))
      return [value.values for value in reduced]

    specs = [[tf.TensorSpec(shape)] * world_size for shape in shapes]
    with fake_gpus.machine(world_size):
      return all_reduce.get_concrete_function(specs).graph

  def copies_into(self, graph):
    """Returns, for each device, the bytes of each tensor that it receives."""
    found = {}
    for operation in graph.get_operations():
      for tensor in operation.inputs:
        if (
          tensor.device != operation.device and tensor.op.type != 'Placeholder'
        ):
          # TensorFlow copies a tensor once to each device that uses it.
          found.setdefault(operation.device, {})[tensor.ref()] = (
            tensor.shape.num_elements() * tensor.dtype.size
          )
    found.pop('', None)  # The results of the function.
    return {device: sorted(sizes.values()) for device, sizes in found.items()}

  def test_at_most_as_many_copies_as_tensorflow(self):
    world_size = 4
    shapes = [[250_000]] * 25
    ours, theirs = (
      self.copies_into(self.graph_of(op, world_size, shapes))
      for op in (
        auto.AutoAllReduce(),
        tf.distribute.HierarchicalCopyAllReduce(),
      )
    )
    most, total = (
      [count(map(len, found.values())) for found in (ours, theirs)]
      for count in (max, sum)
    )
    self.assertLessEqual(*most)
    self.assertLessEqual(*total)
    self.assertEqual(total[0], 2 * (world_size - 1))
    unpacked = self.copies_into(
      self.graph_of(cross_device.ScheduledAllReduce('direct'), 2, shapes)
    )
    # One tensor is cut in the middle of all bytes.
    self.assertEqual(max(map(len, unpacked.values())), 26)

  def test_large_tensors_are_not_packed(self):
    sizes = [4_000_000, 40_000_000]
    shapes = [[size // 4] for size in (sizes[0], sizes[1], 1000, sizes[1])]
    found = self.copies_into(self.graph_of(auto.AutoAllReduce(), 2, shapes))
    expected = [sizes[0] + 1000, sizes[1], sizes[1]]
    self.assertEqual(found, dict.fromkeys(gpus(2), expected))
    graph = self.graph_of(auto.AutoAllReduce(), 2, shapes[1:2])
    self.assertNotIn('ConcatV2', [o.type for o in graph.get_operations()])

  @parameterized.parameters(replicas.SUM, replicas.MEAN)
  def test_sums_are_exact(self, reduce_op):
    """Runs the packed plan on the devices of the test."""
    devices = replicas.devices(3)
    ranks = [
      replicas.inputs(dtype, shape, 3, reduce_op)
      for dtype in replicas.DTYPES
      for shape in ((3, 5), (0,), (), (7,))
    ]
    op = auto.AutoAllReduce()
    with (
      mock.patch.object(links, 'name_of', return_value='one_gpu'),
      mock.patch.object(executor, 'share_memory', return_value=False),
    ):
      results = replicas.all_reduced(op, reduce_op, ranks, devices)
    for rank, result in zip(ranks, results, strict=True):
      replicas.assert_equal(result, replicas.exact(rank, reduce_op), devices)


@contextlib.contextmanager
def fake_nccl(op):
  """Replaces NCCL by an op that packs like it, and GPUs by the test's devices."""
  op._nccl = tf.distribute.HierarchicalCopyAllReduce()
  nccl_calls = mock.patch.object(
    op._nccl,
    'batch_reduce_implementation',
    wraps=op._nccl.batch_reduce_implementation,
  )
  with (
    mock.patch.object(links, 'nccl_is_usable', return_value=True),
    nccl_calls as calls,
  ):
    yield calls


class NcclTest(tf_case.TestCase):
  def test_only_graphs_use_nccl(self):
    op = auto.AutoAllReduce()
    ranks = replicas.inputs('float32', (8,), 4)
    value = replicas.on_devices(ranks, replicas.devices(4))

    def all_reduce():
      return op.batch_reduce(replicas.SUM, [(value, value)])[0].values

    with fake_nccl(op) as nccl_calls:
      tf.function(all_reduce)()
      # The formula of the ring.
      self.assertEqual(max(op.report()['all_reduce_bytes_in'].values()), 48)
      all_reduce()  # NCCL needs a graph.
      nccl_calls.assert_called_once()
    self.assertEqual(op.calls, 2)

  @parameterized.parameters(replicas.SUM, replicas.MEAN)
  def test_nccl_is_used_only_for_exact_dtypes(self, reduce_op):
    """Checks all dtypes: TensorFlow packs tensors, and its op supports only five."""
    op, devices = auto.AutoAllReduce(), replicas.devices(4)
    ranks = [
      replicas.inputs(dtype, (3, 5), 4, reduce_op) for dtype in replicas.DTYPES
    ]
    values = [replicas.on_devices(r, devices) for r in ranks]

    @tf.function
    def all_reduce():
      reduced = op.batch_reduce(reduce_op, [(v, v) for v in values])
      return [value.values for value in reduced]

    with fake_nccl(op) as nccl_calls:
      results = all_reduce()
    given = [
      value.values[0].dtype.name
      for call in nccl_calls.call_args_list
      for value, _ in call.args[1]
    ]
    self.assertCountEqual(given, ['float32', 'float64'])
    for rank, result in zip(ranks, results, strict=True):
      for copy in result:
        expected = replicas.exact(rank, reduce_op)
        self.assertEqual(copy.dtype, expected.dtype)
        self.assertAllEqual(copy, expected)

  def test_mismatched_replicas_are_refused(self):
    op, devices = auto.AutoAllReduce(), replicas.devices(2)
    value = replicas.on_devices([[1.0], [1.0, 2.0]], devices)
    reduce = tf.function(
      lambda: op.batch_reduce(replicas.SUM, [(value, value)])
    )
    with (
      fake_nccl(op),
      self.assertRaisesRegex(errors.UnsupportedOptionError, 'replica 1'),
    ):
      reduce()

  def test_graph_of_nccl(self):
    """Checks the ops that TensorFlow runs on simulated GPUs."""
    op, devices = auto.AutoAllReduce(), gpus(3)

    @tf.function
    def all_reduce(*rows):
      # The arguments of a function have no device.
      values = [_tf_internal.PerReplica(row) for row in rows]
      with mock.patch.object(base, '_holders', return_value=tuple(devices)):
        reduced = op.batch_reduce_implementation(
          replicas.SUM, [(v, v) for v in values], None
        )
      return [value.values for value in reduced]

    spec = tf.TensorSpec([6], tf.float32)
    with fake_gpus.machine(1, 1, 1):
      graph = all_reduce.get_concrete_function([spec] * 3, [spec] * 3).graph
    found = [o for o in graph.get_operations() if o.type == 'NcclAllReduce']
    self.assertCountEqual([o.device for o in found], devices)
    self.assertLen({o.get_attr('shared_name') for o in found}, 1)
    for operation in found:
      self.assertEqual(operation.get_attr('num_devices'), 3)
      # One tensor contains both.
      self.assertEqual(operation.inputs[0].shape, [12])

  @pytest.mark.soak
  def test_nccl_on_one_gpu(self):
    """Runs NCCL with one member on a whole GPU, if there is one."""
    [(found, results)] = processes.run_workers(nccl.auto_all_reduce, 1)
    for result, expected in zip(results, ([1.0, 2.0], [3.0], [4]), strict=True):
      self.assertAllEqual(result, expected)
    devices = [device for kind, device in found if kind == 'NcclAllReduce']
    self.assertLen(devices, 2 if nccl.IS_GPU else 0)


if __name__ == '__main__':
  tf.test.main()

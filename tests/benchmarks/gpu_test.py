"""The benchmark for GPUs runs on CPUs; the figures of a GPU need one."""

import os

import pytest
import tensorflow as tf

from benchmarks import gpu_links, processes
from tests.benchmarks import running

_BUILD = """
from benchmarks import gpu, gpu_step

size = dict(gpu._SIZES['gpu']['transformer'])
size.pop('rows')
model = gpu_step.transformer(**size)
print(model.count_params(), *model.output_shape[1:])
"""


@pytest.mark.multi_process
@pytest.mark.full
class GpuBenchmarkTest(tf.test.TestCase):
  def _measure(self, parts):
    """The program that has measured the parts on CPUs, and its report."""
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'gpu', '--device=cpu', f'--parts={parts}', f'--report_json={path}'
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    return done, running.read_json(path)

  @pytest.mark.soak
  def test_parts_on_cpus(self):
    _, found = self._measure('input,mnist')
    self.assertBetween(found['input'][0]['input_share'], 0.0, 1.0)
    self.assertLen(found['mnist'], 2)
    for row in found['mnist']:
      self.assertGreater(row['accuracy'], 0.9)

  @pytest.mark.soak
  def test_steps_on_cpus(self):
    _, found = self._measure('step')
    self.assertLen(found['step'], 9)
    for row in found['step']:
      self.assertNotIn('error', row)
      self.assertGreater(row['ratio_to_one_device'], 0.0)

  @pytest.mark.soak
  def test_links_on_cpus(self):
    done, found = self._measure('links')
    self.assertEqual(found['hardware']['gpus'], [])
    copies, choices = found['links']['copies'], found['links']['choices']
    self.assertEqual(
      [copy['between'] for copy in copies],
      ['CPU:0 and CPU:1', 'CPU:1 and CPU:0'],
    )
    for copy in copies:
      self.assertIn(gpu_links.line_of(copy), done.stdout)
    self.assertEqual([c['set'] for c in choices], ['1x4KB', '1x64KB'])
    for choice in choices:
      fastest = min(choice['median_ms'].values())
      self.assertAllClose(choice['auto_to_best'], choice['auto_ms'] / fastest)

  def test_a_part_that_fails_is_in_the_report(self):
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'gpu',
      '--device=cpu',
      '--parts=mnist',
      '--data_path=/missing/mnist.npz',
      f'--report_json={path}',
    )
    self.assertEqual(done.returncode, 1)
    self.assertIn('failed: mnist', done.stderr)
    found = running.read_json(path)
    self.assertIn('/missing/mnist.npz', found['mnist']['error'])

  def test_transformer_has_a_hundred_million_parameters(self):
    # In a process of its own: its flags have the names of the examples'.
    done = processes.run_python('-c', _BUILD, cwd=running.ROOT)
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    parameters, length, units = map(int, done.stdout.split())
    self.assertBetween(parameters, 95e6, 115e6)
    self.assertEqual((length, units), (256, 16_000))


if __name__ == '__main__':
  tf.test.main()

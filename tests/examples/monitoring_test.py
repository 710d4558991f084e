"""The measurements of the examples, which flags turn on."""

import os

import tensorflow as tf

from benchmarks import processes
from tests import virtual_devices
from tests.examples import programs
from tf_strategies.monitoring import merge

virtual_devices.configure()


class TwoWorkersTest(tf.test.TestCase):
  def test_timelines_of_a_job_are_put_together(self):
    directory = self.create_tempdir().full_path
    path = os.path.join(directory, 'run.json')
    program = programs.Program(
      'mnist_keras_fit',
      '--strategy=multi_worker_ring',
      '--dataset=digits',
      '--model=mlp',
      '--epochs=1',
      f'--timeline={path}',
      output=os.path.join(directory, 'output'),
      launcher=['--num_workers=2'],
    )
    self.addCleanup(program.kill)
    self.assertEqual(program.wait(), 0, program.output())
    parts = [os.path.join(directory, f'run-{rank}.json') for rank in range(2)]
    merged = processes.run_python(
      *('-m', 'tf_strategies', 'timeline', 'merge'),
      *parts,
      f'--output={path}',
      is_checked=True,
    )
    self.assertRegex(merged.stdout, r'rank 1 .*: ahead by .* us, within')
    events = merge.load(path)['traceEvents']
    for rank in range(2):
      steps = [
        e['args']['step']
        for e in events
        if e.get('cat') == 'step' and e['pid'] == rank
      ]
      self.assertEqual(steps, [*range(1, 24)])


if __name__ == '__main__':
  tf.test.main()

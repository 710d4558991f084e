"""The measurements of the examples, which flags turn on."""

import json
import os

import tensorflow as tf

from tests import virtual_devices
from tests.examples import programs

virtual_devices.configure()


class TwoWorkersTest(tf.test.TestCase):
  def test_each_worker_writes_a_timeline(self):
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
    for rank in range(2):
      with open(
        os.path.join(directory, f'run-{rank}.json'), encoding='utf-8'
      ) as f:
        events = json.load(f)['traceEvents']
      steps = [e['args']['step'] for e in events if e.get('cat') == 'step']
      self.assertEqual(steps, [*range(1, 24)])


if __name__ == '__main__':
  tf.test.main()

"""The examples in the docstrings run, and each program says how to run it."""

import importlib
import re

import tensorflow as tf
from absl import flags
from absl.testing import parameterized

from examples import (
  common_flags,
  mnist_parameter_server,
  parameter_server_flags,
)
from tests import docstrings, virtual_devices

virtual_devices.configure_logical_cpus()


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    'common_flags',
    'compare_weights',
    'mnist_model',
    'parameter_server_flags',
    'training_report',
  )
  def test_docstrings_show_what_happens(self, name):
    docstrings.check_examples(self, f'examples.{name}')

  @parameterized.parameters('mnist_keras_fit', 'mnist_custom_loop')
  def test_launch_command_parses(self, name):
    text = importlib.import_module(f'examples.{name}').__doc__
    command = re.search(r'  python -m examples\.(\w+) ([^\n]*\\\n[^\n]*)', text)
    self.assertEqual(command[1], name)
    flag_values = flags.FlagValues()
    common_flags.define(flag_values)
    flag_values([name, *command[2].replace('\\\n', ' ').split()])
    options = common_flags.parse(flag_values)
    self.assertEqual(options.strategy, 'ring_mirrored')
    self.assertEqual(options.dataset, 'digits')
    self.assertEqual(flag_values.num_virtual_devices, 4)

  def test_launch_commands_of_parameter_servers_parse(self):
    text = mnist_parameter_server.__doc__.replace('\\\n', ' ')
    commands = re.findall(r'^  (python -m .*)$', text, re.M)
    self.assertLen(commands, 3)
    loops = []
    for command in commands:
      launcher, _, program = command.rpartition(' -- ')
      if launcher:
        self.assertIn('--num_workers=2 --num_ps=2 --chief', launcher)
      python, module, name, *arguments = program.split()
      self.assertEqual([python, module], ['python', '-m'])
      self.assertEqual(name, 'examples.mnist_parameter_server')
      flag_values = flags.FlagValues()
      parameter_server_flags.define(flag_values)
      flag_values([name, *arguments])
      options = parameter_server_flags.parse(flag_values)
      self.assertEqual(options.dataset, 'digits')
      loops.append(options.loop)
    self.assertEqual(loops, ['fit', 'custom', 'fit'])


if __name__ == '__main__':
  tf.test.main()

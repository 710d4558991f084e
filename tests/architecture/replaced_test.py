"""Few functions of TensorFlow and Keras are replaced, and each one is listed here."""

import json

from absl.testing import absltest

from benchmarks import processes
from tests.architecture import project

# ARCHITECTURE.md says where each one is replaced. Before adding one, remove
# another.
_REPLACED = (
  'keras.src.backend.common.variables.register_uninitialized_variable',
  'keras.src.backend.tensorflow.numpy.take',
  'keras.src.backend.tensorflow.trainer.TensorFlowTrainer._make_function',
  'keras.src.backend.tensorflow.trainer.TensorFlowTrainer._maybe_symbolic_build',
  'keras.src.backend.tensorflow.trainer.TensorFlowTrainer.make_predict_function',
  'keras.src.callbacks.callback_list.CallbackList.set_model',
  'keras.src.optimizers.base_optimizer.BaseOptimizer.build',
  'keras.src.trainers.trainer.Trainer._resolve_auto_jit_compile',
  'tensorflow.python.distribute.failure_handling.failure_handling.'
  'PreemptionCheckpointHandler.__init__',
  'tensorflow.python.framework.errors_impl.UnknownError.__new__',
)

# Prints the functions in modules and classes of TensorFlow and Keras whose code
# is in this package.
_PROGRAM = """
import importlib, inspect, json, os, pkgutil, sys
import tensorflow as tf
import tf_strategies
from tensorflow.python.framework import ops

for info in pkgutil.walk_packages(tf_strategies.__path__, 'tf_strategies.'):
  if not info.name.endswith('__main__'):
    importlib.import_module(info.name)
from tf_strategies import _graph_errors, errors
try:
  with _graph_errors.typed():
    raise errors.DataError('a test')
except RuntimeError:
  pass

ours = os.path.dirname(tf_strategies.__file__) + os.sep

def is_ours(value):
  if isinstance(value, (staticmethod, classmethod)):
    value = value.__func__
  if isinstance(value, property):
    value = value.fget
  if not inspect.isfunction(value):
    return False
  is_one = value.__code__.co_filename.startswith(ours)
  return is_one or is_ours(vars(value).get('__wrapped__'))

def is_theirs(name):
  return name.partition('.')[0] in ('keras', 'tensorflow')

found = set()
for name, module in list(sys.modules.items()):
  if not is_theirs(name) or not inspect.ismodule(module):
    continue
  for key, value in list(vars(module).items()):
    if is_ours(value):
      found.add(f'{name}.{key}')
    if inspect.isclass(value) and is_theirs(value.__module__):
      found.update(
        f'{value.__module__}.{value.__qualname__}.{k}'
        for k, v in vars(value).items() if is_ours(v)
      )
for name in ops.gradient_registry.list():
  if is_ours(ops.gradient_registry.lookup(name)):
    found.add(f'the gradient of {name}')
print(json.dumps(sorted(found)))
"""


class ReplacedTest(absltest.TestCase):
  def test_every_replaced_function_is_listed(self):
    done = processes.run_python('-c', _PROGRAM)
    self.assertEqual(done.returncode, 0, done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    self.assertEqual(found, sorted(_REPLACED))

  def test_few_functions_are_replaced(self):
    self.assertLessEqual(len(_REPLACED), 12)
    for never in ('BaseOptimizer.apply', 'LossScaleOptimizer.apply'):
      self.assertFalse([name for name in _REPLACED if name.endswith(never)])
    for path, text in project.text_files().items():
      if path.startswith('tf_strategies/'):
        self.assertNotRegex(text, r'(_call_flat|__call__) = ', path)


if __name__ == '__main__':
  absltest.main()

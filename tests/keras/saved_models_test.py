"""Another program loads a saved model that contains our classes."""

import pathlib

import keras
import numpy as np
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from benchmarks import processes
from tests import tiers, virtual_devices
from tests.architecture import documents, project

virtual_devices.configure()

_LOAD = """
import keras, numpy as np
model = keras.models.load_model({path!r})
x = np.array({x})
print(type(model.optimizer).__name__, model.predict(x, verbose=0).tolist())
"""


def _error_of_page() -> documents.Block:
  text = project.text_files()['docs/errors.md']
  return next(
    block
    for block in documents.blocks(text, 'text')
    if 'Could not locate class' in block.body
  )


class SavedModelsTest(parameterized.TestCase):
  @tiers.parameters(
    ('DynamicEmbedding', 'SGD'),
    tiers.soak('LazyRows', 'LazyRows'),
  )
  def test_import_that_the_page_names_is_what_is_missing(self, missing, loaded):
    layer, optimizer = keras.layers.Embedding(10, 2), keras.optimizers.SGD()
    if missing == 'DynamicEmbedding':
      layer = tfs.keras.DynamicEmbedding(2)
    else:
      optimizer = tfs.keras.LazyRows(optimizer)
    model = keras.Sequential([keras.Input([1], dtype='int64'), layer])
    model.compile(optimizer, 'mse')
    path = str(pathlib.Path(self.create_tempdir().full_path, 'm.keras'))
    model.save(path)
    x = [[7], [9]]
    program = _LOAD.format(path=path, x=x)

    failed = processes.run_python('-c', program)
    self.assertNotEqual(failed.returncode, 0)
    head = _error_of_page().body.partition('...')[0]
    head = head.replace('DynamicEmbedding', missing)
    self.assertIn(head.strip(), failed.stderr)

    program = f'import tf_strategies.keras\n{program}'
    done = processes.run_python('-c', program, is_checked=True)
    expected = model.predict(np.array(x), verbose=0).tolist()
    self.assertEqual(done.stdout, f'{loaded} {expected}\n')


if __name__ == '__main__':
  absltest.main()

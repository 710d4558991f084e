"""The part `step` of `benchmarks.gpu`: steps of two models, by strategy.

Each row trains in a process of its own. All rows of a model are built, and trained to
warm up, at the same time; then they take turns, so that a GPU that slows down slows
all of them down.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import measure, worker_pool
from tf_strategies import errors

# Strategy, number of devices, and whether XLA compiles; None trains without strategy.
ROWS = (
  (None, 1, False),
  ('ring_mirrored', 1, False),
  ('ring_mirrored', 2, False),
  ('ring_mirrored', 4, False),
  ('central_storage', 2, False),
  ('mirrored', 2, False),
  ('mirrored', 4, False),
)
# For the transformer alone: ResNet-50 takes XLA minutes.
_XLA_ROWS = ((None, 1, True), ('ring_mirrored', 2, True))
# Of the GPU, for all parts of a process together.
_GIGABYTES = 64.0


def resnet50(pixels: int):
  """ResNet-50 for images of so many pixels a side."""
  import keras

  shape = [pixels, pixels, 3]
  return keras.applications.ResNet50(weights=None, input_shape=shape)


def transformer(length: int, width: int, layers: int, vocabulary: int = 16_000):
  """A causal language model; 110 million parameters with a width of 768, 12 deep."""
  import keras

  head = min(64, width)
  tokens = keras.layers.Input([length], dtype='int32')
  x = keras.layers.Embedding(vocabulary, width)(tokens)
  for _ in range(layers):
    y = keras.layers.LayerNormalization()(x)
    attention = keras.layers.MultiHeadAttention(width // head, head)
    x = x + attention(y, y, use_causal_mask=True)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.Dense(4 * width, activation='gelu')(y)
    x = x + keras.layers.Dense(width)(y)
  return keras.Model(tokens, keras.layers.Dense(vocabulary, dtype='float32')(x))


def compiled(name: str, sizes: Mapping[str, Any], is_xla: bool = False):
  """A compiled model, and one batch of what it is trained on."""
  import keras
  import numpy as np

  rng = np.random.default_rng(1)
  size = dict(sizes[name])
  rows = size.pop('rows')
  if name == 'resnet50':
    model = resnet50(**size)
    x = rng.normal(size=(rows, size['pixels'], size['pixels'], 3))
    x, y = x.astype(np.float32), rng.integers(0, 1000, rows)
  else:
    model = transformer(**size)
    x = rng.integers(0, 16_000, [rows, size['length']]).astype(np.int32)
    y = x
  is_transformer = name == 'transformer'
  model.compile(
    keras.optimizers.Adam(1e-4)
    if is_transformer
    else keras.optimizers.SGD(0.1),
    keras.losses.SparseCategoricalCrossentropy(from_logits=is_transformer),
    jit_compile=is_xla,
  )
  return model, (x, y)


def fit(model, dataset, steps: int, blocks: int) -> list[float]:
  """Seconds a step of each block of `steps`, after one to warm up."""
  from benchmarks import training_actor

  clock = training_actor.BlockClock(steps)
  model.fit(
    dataset,
    steps_per_epoch=(1 + blocks) * steps,
    epochs=1,
    verbose=0,
    callbacks=[clock],
  )
  return clock.seconds()


class Actor:
  """A row; `pool_worker` calls the methods.

  Args:
    rank: 0.
  """

  def __init__(self, rank: int):
    del rank
    self._devices: list[str] = []

  def set_up(
    self,
    model: str,
    strategy: str,
    count: int,
    is_xla: bool,
    device: str,
    sizes: Mapping[str, Any],
  ) -> int:
    """Builds a model, and trains it for two steps; returns its parameters' number."""
    import keras
    import tensorflow as tf

    self._devices = measure.split_device(device, count, _GIGABYTES / count)
    keras.mixed_precision.set_dtype_policy('mixed_bfloat16')
    keras.utils.set_random_seed(1)
    with _strategy(strategy, self._devices).scope():
      self._model, batch = compiled(model, sizes, is_xla)
    self._dataset = tf.data.Dataset.from_tensors(batch).repeat()
    fit(self._model, self._dataset, steps=1, blocks=1)
    return int(self._model.count_params())

  def run(self, steps: int, blocks: int) -> dict[str, Any]:
    """Trains: `seconds` a step of each block; most `peak_bytes` of a GPU so far."""
    import tensorflow as tf

    seconds = fit(self._model, self._dataset, steps, blocks)
    peak = None
    if self._devices[0].startswith('GPU'):
      info = tf.config.experimental.get_memory_info
      peak = sum(info(device)['peak'] for device in self._devices)
    return {'seconds': seconds, 'peak_bytes': peak}


def run(
  model: str, device: str, sizes: Mapping[str, Any], rows: list[dict[str, Any]]
) -> None:
  """Appends a model's rows to `rows`, and what they have after each round.

  One that fails has an `error`, and the others go on.
  """
  own = [
    {
      'model': model,
      'strategy': strategy or 'none',
      'devices': count,
      'is_xla': is_xla,
      'seconds': [],
    }
    for strategy, count, is_xla in (
      ROWS + _XLA_ROWS if model == 'transformer' else ROWS
    )
  ]
  rows += own
  with contextlib.ExitStack() as stack:
    pools = {}
    for number, row in enumerate(own):
      pools[number] = stack.enter_context(
        worker_pool.WorkerPool(
          f'{row["strategy"]} on {row["devices"]}',
          'benchmarks.gpu_step:Actor',
          [()],
        )
      )
      pools[number].send(
        'set_up',
        model=model,
        strategy=row['strategy'],
        count=row['devices'],
        is_xla=row['is_xla'],
        device=device,
        sizes=sizes,
      )

    def answer(number, method, *args, **arguments):
      try:
        return getattr(pools[number], method)(*args, **arguments)[0]
      except errors.WorkerUnavailableError as e:
        own[number]['error'] = str(e)
        pools.pop(number).close()

    for number in list(pools):
      own[number]['parameters'] = answer(number, 'receive')
      _progress(f'{model}: {number + 1} of {len(own)} are ready')
    for order in measure.turns(list(pools), sizes['rounds']):
      for number in order:
        if number in pools:
          found = answer(
            number, 'ask', 'run', steps=sizes['steps'], blocks=sizes['blocks']
          )
          if found:
            own[number]['seconds'] += found['seconds']
            own[number]['peak_bytes'] = found['peak_bytes']
      _summarize(own)
      _progress(f'{model}: a round')


def _summarize(rows) -> None:
  """Adds medians, and ratios to one device without a strategy."""
  for row in rows:
    if row['seconds']:
      spread = measure.Spread.of(row['seconds'])
      for name in ('median_ms', 'p10_ms', 'p90_ms'):
        row[name] = getattr(spread, name)
  alone = {
    row['is_xla']: row.get('median_ms')
    for row in rows
    if row['strategy'] == 'none'
  }
  for row in rows:
    if 'median_ms' in row and alone[row['is_xla']]:
      row['ratio_to_one_device'] = row['median_ms'] / alone[row['is_xla']]


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _strategy(name: str, devices: Sequence[str]):
  import tensorflow as tf

  import tf_strategies as tfs

  if name == 'none':
    return tf.distribute.get_strategy()
  if name == 'mirrored':
    return tf.distribute.MirroredStrategy(devices)
  return tfs.create_strategy(name, devices=list(devices))

"""What strategies cost on a GPU: all parts in one run of under ten minutes.

  python -m benchmarks.gpu --data_path=mnist.npz --report_json=gpu.json
  python -m benchmarks.gpu --device=cpu            small sizes, to try the program
  python -m benchmarks.gpu --parts=links,all_reduce

* links: what a copy between devices costs, and between host and device; by how much
  AutoAllReduce's choice is slower than the best, by size.
* all_reduce: on 2 and 4 devices of one process, ours beside TensorFlow's.
* step: of a ResNet-50 and of a transformer of 100 million parameters, in bfloat16,
  on one device and on 1, 2 and 4. Virtual GPUs share one GPU, and the batch is the
  same: what they take longer is what the strategy costs.
* workers: two processes on the GPU, over the ring: what of the reduction is hidden.
* input: what of a step is waiting for images that are decoded on the host.
* mnist: both examples, to an accuracy of 0.985.

Each measurement has a process of its own, and memory of the GPU as it needs. A part
that fails is in the report with its error; the others go on.
"""

import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

# TensorFlow reads them when it is imported; processes inherit them.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
os.environ.setdefault('TF_FORCE_GPU_ALLOW_GROWTH', 'true')

from absl import app, flags

from benchmarks import gpu_links, gpu_step, measure, processes, report

PARTS = ('links', 'all_reduce', 'step', 'workers', 'input', 'mnist')
_PART = flags.DEFINE_list('parts', list(PARTS), f'Some of {",".join(PARTS)}.')
_DEVICE = flags.DEFINE_enum(
  'device', 'gpu', ['gpu', 'cpu'], 'Where; on CPUs sizes are small.'
)
_DATA_PATH = flags.DEFINE_string(
  'data_path', None, 'MNIST as .npz; without it the digits of scikit-learn.'
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'Where to write it all.'
)

# Of `benchmarks.training_step`.
_WORKERS = (
  'ring_1mb',
  'ring_8mb',
  'ring_64mb',
  'collective',
  'one_device_global_batch',
  'no_communication',
)
_SIZES = {
  'gpu': {
    'copies': [2**n for n in (2, 12, 16, 20, 24, 28)],
    'sets_of_links': ['1x64KB', '1x1MB', '1x16MB'],
    'sets': {2: ['25x1MB', '1x400MB'], 4: ['25x1MB', 'resnet', '1x400MB']},
    'resnet50': {'rows': 64, 'pixels': 224},
    'transformer': {'rows': 16, 'length': 256, 'width': 768, 'layers': 12},
    'models': ['resnet50', 'transformer'],
    'workers': ['--per_replica_batch_size=512'],
    'steps': 10,
    'blocks': 2,
    'rounds': 4,
  },
  'cpu': {
    'copies': [4, 4096, 65536],
    'sets_of_links': ['1x4KB', '1x64KB'],
    'sets': {2: ['4x64KB'], 4: ['4x64KB']},
    'resnet50': {'rows': 4, 'pixels': 32},
    'transformer': {'rows': 4, 'length': 8, 'width': 32, 'layers': 2},
    # ResNet-50 takes nine processes on two cores more than five minutes.
    'models': ['transformer'],
    'workers': ['--width=64', '--blocks=2', '--steps=2'],
    'steps': 2,
    'blocks': 2,
    'rounds': 1,
  },
}


def measure_input(device: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
  """A step of ResNet-50 on one device, on one batch and on images from a pipeline."""
  import keras
  import numpy as np
  import tensorflow as tf

  import tf_strategies as tfs

  devices = measure.split_device(device, 1)
  keras.mixed_precision.set_dtype_policy('mixed_bfloat16')
  rows, pixels = sizes['resnet50']['rows'], sizes['resnet50']['pixels']
  with tfs.RingMirroredStrategy(devices).scope():
    model, batch = gpu_step.compiled('resnet50', sizes)
  rng = np.random.default_rng(1)
  images = rng.integers(0, 256, [64, pixels, pixels, 3]).astype(np.uint8)
  encoded = [tf.io.encode_jpeg(image).numpy() for image in images]

  def decode(text, label):
    image = tf.io.decode_jpeg(text, channels=3)
    image = tf.image.random_flip_left_right(image)
    return tf.cast(image, tf.float32) / 255.0, label

  decoded = (
    tf.data.Dataset.from_tensor_slices((encoded, rng.integers(0, 1000, 64)))
    .repeat()
    .map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    .batch(rows, drop_remainder=True)
    .prefetch(tf.data.AUTOTUNE)
  )
  still = tf.data.Dataset.from_tensors(batch).repeat()
  found = {
    name: measure.Spread.of(
      gpu_step.fit(model, dataset, sizes['steps'], sizes['blocks'])
    ).median_ms
    for name, dataset in (('still', still), ('decoded', decoded))
  }
  return {
    'one_batch_ms': found['still'],
    'decoded_ms': found['decoded'],
    'input_share': max(0.0, 1 - found['still'] / found['decoded']),
  }


def _links(sizes, rows) -> dict[str, list[dict[str, Any]]]:
  del rows
  copies = measure.in_a_process(
    gpu_links.measure_copies, _DEVICE.value, sizes['copies'], sizes['rounds']
  )
  _progress(f'{copies}')
  results = _measure_sets(sizes, 4, sizes['sets_of_links'])
  return {'copies': copies, 'choices': gpu_links.choices(results)}


def _all_reduce(sizes, rows) -> list[dict[str, Any]]:
  for count, sets in sizes['sets'].items():
    for name in sets:
      _progress(f'{name} on {count}')
      rows += _measure_sets(sizes, count, [name])
  return rows


def _measure_sets(sizes, count, sets) -> list[dict[str, Any]]:
  found = _run(
    'benchmarks.all_reduce',
    f'--device={_DEVICE.value}',
    f'--num_devices={count}',
    f'--sets={",".join(sets)}',
    f'--rounds={sizes["rounds"]}',
  )
  return found['results']


def _step(sizes, rows) -> list[dict[str, Any]]:
  for model in sizes['models']:
    gpu_step.run(model, _DEVICE.value, sizes, rows)
  return rows


def _workers(sizes, rows) -> list[dict[str, Any]]:
  del rows
  found = _run(
    'benchmarks.training_step',
    f'--device={_DEVICE.value}',
    f'--rounds={sizes["rounds"]}',
    f'--peers={",".join(_WORKERS)}',
    *sizes['workers'],
  )
  alone = next(
    r['median_ms']
    for r in found['results']
    if r['peer'] == 'one_device_global_batch'
  )
  for row in found['results']:
    reduce_ms = row['predicted_reduce_ms']
    row['hidden_share'] = None
    if reduce_ms:
      # Of what the wire alone takes, by its measured latency and bandwidth.
      row['hidden_share'] = 1 - (row['median_ms'] - alone) / reduce_ms
  return found['results']


def _input(sizes, rows) -> list[dict[str, Any]]:
  del rows
  return [measure.in_a_process(measure_input, _DEVICE.value, sizes)]


def _mnist(sizes, rows) -> list[dict[str, Any]]:
  del sizes
  data = ['--dataset=digits', '--min_accuracy=0.9']
  if _DATA_PATH.value:
    path = os.path.abspath(_DATA_PATH.value)
    data = ['--dataset=mnist', f'--data_path={path}', '--min_accuracy=0.985']
  for name in ('mnist_keras_fit', 'mnist_custom_loop'):
    _progress(name)
    began = time.monotonic()
    made = _run(
      f'examples.{name}', '--num_virtual_devices=4', '--noverbose', *data
    )
    rows.append(
      {
        'example': name,
        'accuracy': made['test']['accuracy'],
        'seconds': time.monotonic() - began,
      }
    )
  return rows


def _run(module: str, *arguments: str) -> dict[str, Any]:
  """What a program writes as its report; it must end well."""
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, 'report.json')
    env = {'CUDA_VISIBLE_DEVICES': '-1'} if _DEVICE.value == 'cpu' else {}
    processes.run_python(
      *('-m', module, f'--report_json={path}', *arguments),
      env=env,
      is_checked=True,
      deadline_seconds=300.0,
    )
    return json.loads(path.read_text())


_COLUMNS = {
  'all_reduce': (
    'num_devices',
    'set',
    'peer',
    'median_ms',
    'p10_ms',
    'p90_ms',
    'ratio_to_fastest_built_in',
  ),
  'step': (
    'model',
    'strategy',
    'devices',
    'is_xla',
    'median_ms',
    'p10_ms',
    'p90_ms',
    'ratio_to_one_device',
    'peak_bytes',
    'error',
  ),
  'workers': (
    'peer',
    'median_ms',
    'p10_ms',
    'p90_ms',
    'predicted_reduce_ms',
    'hidden_share',
  ),
  'input': ('one_batch_ms', 'decoded_ms', 'input_share'),
  'mnist': ('example', 'accuracy', 'seconds'),
}


def table(part: str, rows: Any) -> str:
  """The rows of a part as a Markdown table; of links what they say."""
  if part == 'links':
    return gpu_links.text(rows)
  columns = _COLUMNS[part]
  return report.markdown(
    columns, [[row.get(c) for c in columns] for row in rows]
  )


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
  """Measures the parts that the flags name."""
  unknown = sorted(set(_PART.value) - set(PARTS))
  if len(argv) > 1 or unknown:
    raise app.UsageError(
      f'{[*argv[1:], *unknown][0]!r}: write --parts={",".join(PARTS)}.'
    )
  report.check_target('report_json', _REPORT_JSON.value)
  sizes = _SIZES[_DEVICE.value]
  content = {'benchmark': 'gpu', **report.environment(), 'settings': sizes}
  functions = (_links, _all_reduce, _step, _workers, _input, _mnist)
  functions = dict(zip(PARTS, functions, strict=True))
  failed = []
  with processes.ended_by_signals():
    for part in _PART.value:
      began, rows = time.monotonic(), []
      # A run that is cut off leaves what it has.
      content[part] = {'error': 'cut off', 'rows': rows}
      try:
        content[part] = functions[part](sizes, rows)
        text = table(part, content[part])
        if part == 'step' and any('error' in row for row in content[part]):
          failed.append(part)
      except Exception as e:
        failed.append(part)
        error = f'{type(e).__name__}: {e}'
        content[part] = {'error': error, 'rows': rows}
        text = traceback.format_exc()
      finally:
        if _REPORT_JSON.value:
          report.write_json(_REPORT_JSON.value, content)
      print(f'\n{part}, {time.monotonic() - began:.0f} s\n\n{text}', flush=True)
  if failed:
    sys.exit(f'failed: {", ".join(failed)}')


if __name__ == '__main__':
  app.run(main)

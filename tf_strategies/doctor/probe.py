"""Loads TensorFlow, and reads its parent's memory, in a process of its own.

  python -m tf_strategies.doctor.probe <place of the parent's memory>

It may end in any way, and prints one line of JSON for each thing that it knows.
"""

import json
import sys
from collections.abc import Sequence

from tf_strategies.process_group.tcp import host_memory


def main(argv: Sequence[str]) -> None:
  """Prints what is found; an error of TensorFlow's or ours ends the process.

  Example:

    >>> main(['probe', '', '--without_tensorflow'])
    {"unreadable": "it is no place"}
  """
  print(json.dumps({'unreadable': _why_unreadable(argv[1])}), flush=True)
  if argv[2:]:
    return
  import keras
  import tensorflow as tf

  # They check that what they need is there.
  from tf_strategies import _keras_internal, _tf_internal  # noqa: F401

  gpus = [
    tf.config.experimental.get_device_details(gpu).get('device_name', gpu.name)
    for gpu in tf.config.list_physical_devices('GPU')
  ]
  found = {
    'TensorFlow': tf.__version__,
    'Keras': keras.__version__,
    'backend': keras.backend.backend(),
    'gpus': gpus,
    'is_for_gpus': tf.test.is_built_with_gpu_support(),
  }
  print(json.dumps(found), flush=True)


def _why_unreadable(place: str) -> str:
  try:
    data = bytes.fromhex(place)
    if len(data) != host_memory.PLACE_BYTES:
      return 'it is no place'
    host_memory.PeerMemory(host_memory.Place.unpack(data))
  except host_memory.UnreadableError as e:
    return str(e)
  return ''


if __name__ == '__main__':
  main(sys.argv)

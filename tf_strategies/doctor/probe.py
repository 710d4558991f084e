"""Loads TensorFlow in a process of its own: `python -m tf_strategies.doctor.probe`.

It may end in any way, and prints a line of JSON if it does not.
"""

import json


def main() -> None:
  """Prints what is found; an error of TensorFlow's or ours ends the process."""
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


if __name__ == '__main__':
  main()

"""Loads TensorFlow in a process of its own: `python -m tf_strategies.doctor.probe`.

It prints one line of JSON, unless TensorFlow crashes or raises.
"""

import json


def main() -> None:
  """Prints versions and devices. An error of TensorFlow's or ours ends the process."""
  import keras
  import tensorflow as tf

  # These modules check at import that the functions they use exist.
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

"""Trains as one of several workers on a test host until an error or a timeout.

  python -m tests.integration.worker_on_host RESULT_FILE SECONDS

Writes a line for each step, and finally the error, to RESULT_FILE.
"""

import json
import sys
import time

import keras
import numpy as np

import tf_strategies as tfs

HEARTBEAT_TIMEOUT_SECONDS = 4.0


def main(path: str, seconds: float) -> None:
  """Fits until `seconds` have passed or an error is raised."""

  class Report(keras.callbacks.Callback):
    """Reports the progress of training to the test."""

    def on_train_batch_end(self, batch, logs=None):
      out.write(json.dumps({'step': batch}) + '\n')
      out.flush()
      if time.monotonic() > ends_at:
        self.model.stop_training = True

  options = tfs.process_group.GroupOptions.from_env(
    heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
    rendezvous_timeout_seconds=60.0,
  )
  with open(path, 'w', encoding='utf-8') as out:
    ends_at = time.monotonic() + seconds
    strategy = tfs.MultiWorkerRingStrategy(
      options=tfs.RingOptions(group=options)
    )
    with strategy.scope():
      model = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(1)])
      model.compile('sgd', 'mse')
    x = np.ones([64, 8], np.float32)
    try:
      model.fit(x, x[:, :1], 8, 100_000, verbose=0, callbacks=[Report()])
      end = {'error': None}
    except Exception as e:  # The test judges any error.
      end = {
        'error': type(e).__name__,
        'is_typed': isinstance(e, tfs.errors.Error),
        'message': str(e),
        'rank': getattr(e, 'rank', None),
      }
    out.write(json.dumps({**end, 'time': time.time()}) + '\n')


if __name__ == '__main__':
  main(sys.argv[1], float(sys.argv[2]))

"""One variant in a process of its own, which answers a line for each line.

  python -m benchmarks.input_pipeline.child

A process can be ended when a pipeline hangs, and its memory and CPU time are the
variant's. Requests and answers are lines of JSON on standard input and output;
the process ends when its input does.

Example:

  >>> from benchmarks.input_pipeline import child
  >>> child.Actor().answer({'do': 'dance'})
  {'error': "UnsupportedOptionError: request 'dance' is not supported. Expected open, run, profile, timeline. Fix: send one of them."}
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from typing import Any

# TensorFlow reads it when it is imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

from benchmarks.input_pipeline import (
  epoch,
  slow_storage,
  stages,
  timeline,
  variants,
  verdict,
)
from examples.datasets import images as images_lib
from tf_strategies import errors


class Actor:
  """Holds a dataset and measures it when it is asked to."""

  def __init__(self):
    self._source: variants.Source | None = None
    self._dataset: tf.data.Dataset | None = None

  def answer(self, request: dict[str, Any]) -> dict[str, Any]:
    """What was asked for as `value`, or what went wrong as `error`.

    Args:
      request: `do` and the arguments of that method.
    """
    arguments = dict(request)
    do = arguments.pop('do')
    try:
      if do not in ('open', 'run', 'profile', 'timeline'):
        raise errors.UnsupportedOptionError(
          f'request {do!r}', 'open, run, profile, timeline', 'send one of them'
        )
      return {'value': getattr(self, do)(**arguments)}
    except Exception as e:
      return {'error': f'{type(e).__name__}: {e}'}

  def open(self, spec: dict[str, Any]) -> dict[str, Any]:
    """Builds the variant.

    Args:
      spec: 'variant' and fields of `variants.Source`; 'arrays' is a directory
        with images.npy and labels.npy.
    """
    waited = tf.Variable(0, dtype=tf.int64)
    self._source = variants.Source(
      arrays=_load(spec.get('arrays')),
      batch_size=spec['batch_size'],
      directory=spec.get('directory'),
      storage=slow_storage.Storage(
        spec.get('first_byte_ms', 0.0), spec.get('mb_per_s')
      ),
      waited=waited,
      pipeline=spec.get('pipeline'),
      steps=spec.get('steps', 200),
    )
    self._dataset = variants.build(spec['variant'], self._source)
    return {}

  def run(self, train_step_s: float) -> dict[str, Any]:
    """An epoch, timed."""
    return dataclasses.asdict(epoch.run(self._dataset, train_step_s))

  def profile(self, train_step_s: float, max_seconds: float) -> dict[str, Any]:
    """An epoch, watched; and what is made of it."""
    found = stages.profile(
      self._dataset,
      train_step_s,
      waited=self._source.waited,
      max_seconds=max_seconds,
    )
    return {
      **dataclasses.asdict(found),
      'verdict': dataclasses.asdict(verdict.judge(found)),
    }

  def timeline(
    self, train_step_s: float, num_steps: int, prefetch: bool
  ) -> dict[str, Any]:
    """The first steps, as intervals."""
    found = timeline.record(self._dataset, train_step_s, num_steps, prefetch)
    return dataclasses.asdict(found)


def _load(directory: str | None) -> images_lib.Images | None:
  if directory is None:
    return None
  return images_lib.Images(
    np.load(os.path.join(directory, 'images.npy')),
    np.load(os.path.join(directory, 'labels.npy')),
  )


def main() -> None:
  """Answers until its input ends, and ends then, whatever it is doing."""
  answers = os.fdopen(os.dup(1), 'w', buffering=1)
  # What a user's pipeline prints must not be taken for an answer.
  os.dup2(2, 1)
  actor = Actor()
  one_at_a_time = threading.Semaphore(0)
  requests: list[str] = []

  def read():
    for line in sys.stdin:
      requests.append(line)
      one_at_a_time.release()
    os._exit(0)  # Also from within a pipeline that hangs.

  threading.Thread(target=read, name='requests', daemon=True).start()
  while one_at_a_time.acquire():
    answers.write(json.dumps(actor.answer(json.loads(requests.pop(0)))) + '\n')


if __name__ == '__main__':
  main()

"""Looks at tf.data's model of a running iterator, again and again.

Example:

  >>> import tensorflow as tf
  >>> from benchmarks.input_pipeline import model_watch
  >>> iterator = iter(tf.data.Dataset.range(4))
  >>> with model_watch.Watch(iterator) as watch:
  ...   watch.look()
  >>> sorted(seen.node.name for seen in watch.seen.values())
  ['Prefetch', 'Range', 'Root']
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# Short beside the files of a benchmark, long beside the look itself (0.1 ms).
_LOOK_SECONDS = 0.004
_JOIN_SECONDS = 10.0


@dataclasses.dataclass
class Seen:
  """The last that was seen of one node."""

  node: Any
  threads: int
  in_interleave: bool
  is_file: bool
  looks: int = 0
  buffered: int = 0


class Watch:
  """Looks at the model of an iterator, again and again, on a thread."""

  def __init__(self, iterator: Iterator):
    self._iterator = iterator
    self.seen: dict[int, Seen] = {}
    self._lock = threading.Lock()
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name='tf_data_model_watch', daemon=True
    )

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *unused):
    self._stop.set()
    self._thread.join(_JOIN_SECONDS)
    # It must not look at an iterator that is being deleted.
    self._iterator = None

  def _run(self) -> None:
    while not self._stop.wait(_LOOK_SECONDS):
      self.look()

  def look(self) -> None:
    """Remembers what each node has done so far."""
    model = tf.data.experimental.get_model_proto(self._iterator)
    with self._lock:
      if model.output in model.nodes:
        self._visit(model, model.nodes[model.output], None, False)

  def _visit(self, model, node, interleave, is_file) -> None:
    own = _parameter(node, 'parallelism')
    threads = own or interleave or 1
    seen = self.seen.setdefault(
      node.id, Seen(node, threads, interleave is not None, is_file)
    )
    # A node that is torn down while the model is read may have lost its time.
    if node.processing_time >= seen.node.processing_time:
      seen.node = node
    seen.threads = max(seen.threads, threads)
    seen.looks += 1
    seen.buffered += node.buffered_elements
    opens_files = 'Interleave' in node.name
    for position, key in enumerate(node.inputs):
      if key not in model.nodes:
        continue
      # The first input names the files, each other one is a file.
      below = opens_files and position > 0
      self._visit(
        model,
        model.nodes[key],
        threads if below else interleave,
        below,
      )


def _parameter(node, name: str) -> int:
  return max(
    (int(p.state_value) for p in node.parameters if p.name == name), default=0
  )

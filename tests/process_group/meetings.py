"""What the worker processes of these tests have in common.

They load the room without TensorFlow: that proves that it needs none, and they
start in a fraction of the time.
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import time
import types


def _leave_the_door_closed():
  spec = importlib.util.find_spec('tf_strategies')
  package = types.ModuleType('tf_strategies')
  package.__path__ = list(spec.submodule_search_locations)
  sys.modules['tf_strategies'] = package


# Only in processes that a test has started: `tf_strategies/__init__.py` imports
# every strategy, and TensorFlow with them.
_IS_WORKER = multiprocessing.current_process().name != 'MainProcess'
if _IS_WORKER and 'tf_strategies' not in sys.modules:
  _leave_the_door_closed()

from tf_strategies import process_group  # noqa: E402


def addresses() -> dict[int, str]:
  """The addresses of this worker's TF_CONFIG by task."""
  cluster = json.loads(os.environ['TF_CONFIG'])['cluster']
  return dict(enumerate(cluster['worker']))


def meet(task: int, **options) -> process_group.Rendezvous:
  """Returns this worker's rendezvous, with deadlines that suit tests."""
  settings = {
    'rendezvous_timeout_seconds': 60.0,
    'collective_timeout_seconds': 60.0,
    'heartbeat_timeout_seconds': 30.0,
    'window_seconds': 0.5,
    **options,
  }
  return process_group.Rendezvous(
    addresses(), task, process_group.GroupOptions.from_env(**settings)
  )


def no_tensorflow() -> bool:
  """Returns whether TensorFlow has stayed out of this process."""
  return 'tensorflow' not in sys.modules


def wait_until(condition, seconds: float = 60.0) -> None:
  """Waits until a condition holds; AssertionError if it never does."""
  end = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > end:
      raise AssertionError('it did not happen')
    time.sleep(0.01)


def wait_for(directory: str, *names: str) -> None:
  """Waits until there are files of these names."""
  for name in names:
    wait_until(lambda n=name: os.path.exists(os.path.join(directory, n)))


def touch(directory: str, name: str) -> None:
  """Makes a file, for `wait_for`."""
  with open(os.path.join(directory, name), 'w'):
    pass

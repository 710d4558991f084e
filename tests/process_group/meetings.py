"""Functions that the worker processes of these tests share."""

import json
import os
import pathlib
import sys

from tests import processes
from tf_strategies import process_group


def addresses() -> dict[int, str]:
  """Returns the addresses in this worker's TF_CONFIG, by task."""
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
  """Returns whether TensorFlow is not loaded in this process."""
  return 'tensorflow' not in sys.modules


def wait_for(directory: str, *names: str) -> None:
  """Waits until files with these names exist."""
  for name in names:
    processes.wait_until(pathlib.Path(directory, name).exists)


def touch(directory: str, name: str) -> None:
  """Creates a file, for `wait_for`."""
  pathlib.Path(directory, name).touch()

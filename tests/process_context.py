"""How tests start processes: as copies of one that has imported TensorFlow.

An import of TensorFlow and Keras takes four seconds of a CPU, and most tests that
start processes start several. A copy is made before anything of TensorFlow runs, and
is a process as any other: it has memory, sockets and signals of its own.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from typing import Any
from unittest import mock

# Read when TensorFlow is imported: errors only, of C++.
_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '2'}
_PRELOADED = ['numpy', 'tensorflow', 'keras']


def process(
  function: Callable[..., Any],
  args: Sequence[Any] = (),
  env: Mapping[str, str] | None = None,
  is_fresh: bool = False,
) -> multiprocessing.Process:
  """A process that calls a module's function, to be started.

  Args:
    function: what it calls.
    args: pickled.
    env: beside this process's environment.
    is_fresh: whether it is to be a new interpreter, and no copy.
  """
  context = multiprocessing.get_context('spawn' if is_fresh else 'forkserver')
  if not is_fresh:
    context.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, _ENVIRONMENT):
      forkserver.ensure_running()
  whole = {**os.environ, **(env or {})}
  return context.Process(
    target=_call, args=(function, tuple(args), whole), daemon=True
  )


def _call(function, args, env):
  # The server has that of the moment when it was started.
  os.environ.clear()
  os.environ.update(env)
  import numpy as np

  # All copies would draw the same numbers.
  np.random.seed()
  function(*args)

"""Moves arrays between processes and hosts, without TensorFlow.

A `Rendezvous` owns the address of this process. Its `form` blocks until the
workers have found each other and returns a `ProcessGroup`; after a failure it
can be called again, and forms a group of those that are there.

Example:

  >>> from tf_strategies import process_group
  >>> import numpy as np
  >>> options = process_group.GroupOptions()
  >>> with process_group.Rendezvous({0: '127.0.0.1:0'}, 0, options) as meeting:
  ...   with meeting.form() as group:
  ...     print(group.world_size, group.all_reduce(np.float32([1, 2])))
  1 [1. 2.]
"""

from tf_strategies.process_group.group import ProcessGroup as ProcessGroup
from tf_strategies.process_group.mpi.group import (
  form_mpi_group as form_mpi_group,
)
from tf_strategies.process_group.options import MAJORITY as MAJORITY
from tf_strategies.process_group.options import GroupOptions
from tf_strategies.process_group.rendezvous.rendezvous import (
  Rendezvous as Rendezvous,
)

# What a program passes to `RingOptions`; the rest is for this package.
__all__ = ['GroupOptions']


def __dir__() -> list[str]:
  return __all__

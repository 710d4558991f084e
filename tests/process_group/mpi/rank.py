"""One rank of group_test.py.

  mpiexec -n 3 python tests/process_group/mpi/rank.py <program> <directory>

Loads the room without TensorFlow: it needs none, and starts sooner.
"""

import importlib
import importlib.util
import sys
import types


def _leave_the_door_closed():
  found = importlib.util.find_spec('tf_strategies')
  package = types.ModuleType('tf_strategies')
  package.__path__ = list(found.submodule_search_locations)
  sys.modules['tf_strategies'] = package


if __name__ == '__main__':
  _leave_the_door_closed()
  programs = importlib.import_module('tests.process_group.mpi.programs')
  programs.run(*sys.argv[1:])

"""`python -m tf_strategies.kubernetes`."""

import sys

from tf_strategies.kubernetes import command

if __name__ == '__main__':
  sys.exit(command.main(['tfs manifests', *sys.argv[1:]]))

"""`python -m tf_strategies.doctor`."""

import sys

from tf_strategies.doctor import command

if __name__ == '__main__':
  sys.exit(command.main(['tfs doctor', *sys.argv[1:]]))

"""`python -m tf_strategies.launch`."""

import sys

from tf_strategies.launch import command

if __name__ == '__main__':
  sys.exit(command.main(['tfs launch', *sys.argv[1:]]))

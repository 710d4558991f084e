"""`python -m tf_strategies.doctor`."""

import sys

from tf_strategies.doctor import command

if __name__ == '__main__':
  sys.exit(command.main(sys.argv))

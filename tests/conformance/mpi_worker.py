"""A worker of the conformance table that `mpiexec` starts.

mpiexec -n 2 python -m tests.conformance.mpi_worker request_file
"""

import sys

from tests.conformance import multi_worker

if __name__ == '__main__':
  multi_worker.serve_request(sys.argv[1])

"""Fake cluster objects for tests of the pool and of engines."""

from tf_strategies.strategies.parameter_server import connection, worker_pool

DEADLINE_SECONDS = 60.0


def pool(test, num_workers):
  """Returns a pool without a cluster, and its fake liveness. Closes it after the test."""
  liveness = Liveness()
  found = worker_pool.WorkerPool(range(num_workers), liveness, DEADLINE_SECONDS)
  test.addCleanup(found.close)
  return found, liveness


class Liveness:
  """Reports the tasks that a test marks as dead. Restarted workers rejoin at once."""

  def __init__(self):
    self.dead_servers = set()
    self.dead_workers = set()

  def address(self, job, index):
    return f'{job}-{index}:1'

  def server_error(self):
    if not self.dead_servers:
      return None
    server = min(self.dead_servers)
    return connection.unavailable(
      f'ps {server} died', server, self.address('ps', server)
    )

  def wait_for_all(self, deadline_seconds):
    del deadline_seconds
    self.dead_servers.clear()

  def is_worker_alive(self, worker):
    return worker not in self.dead_workers

  def is_complete(self):
    return True

  def changed_recently(self):
    return False

  def silent_tasks(self):
    return []

  def rejoin(self, worker):
    self.dead_workers.discard(worker)
    return True


class Recovery:
  """Runs actions without recovery."""

  def with_recovery(self, action):
    return action()

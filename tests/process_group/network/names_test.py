"""Host names that cannot be resolved do not delay live peers, and are reported."""

import asyncio
import socket
import threading
import time
from concurrent import futures
from unittest import mock

import pytest
from absl.testing import absltest

from tf_strategies import errors
from tf_strategies.launch import ports as ports_lib
from tf_strategies.process_group import options
from tf_strategies.process_group.network import names, server
from tf_strategies.process_group.rendezvous import rendezvous

_look_up = socket.getaddrinfo


class _Names:
  """A resolver that answers for live hosts and hangs for dead hosts."""

  def __init__(self, test):
    self._go_on = threading.Event()
    test.addCleanup(self._go_on.set)
    self.asked = []

  def __call__(self, host, *args, **kwargs):
    self.asked.append(host)
    if host.startswith('dead'):
      self._go_on.wait(60)
      raise socket.gaierror(-3, 'Temporary failure in name resolution')
    return _look_up('127.0.0.1', *args, **kwargs)


class NamesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.names = _Names(self)
    patch = mock.patch.object(socket, 'getaddrinfo', self.names)
    patch.start()
    self.addCleanup(patch.stop)

  def test_live_peers_form_a_group_despite_hanging_names(self):
    ports = ports_lib.pick_ports(2)
    addresses = {t: f'live-{t}:{port}' for t, port in enumerate(ports)}
    addresses |= {t: f'dead-{t}:1' for t in range(2, 40)}
    settings = options.GroupOptions(
      secret=b'a secret of this test',
      min_workers=2,
      window_seconds=0.2,
      rendezvous_timeout_seconds=30,
    )
    started = time.monotonic()

    def work(task):
      with (
        rendezvous.Rendezvous(addresses, task, settings) as meeting,
        meeting.form() as group,
      ):
        group.barrier()
        return group.world_size

    with futures.ThreadPoolExecutor(2) as threads:
      self.assertEqual(list(threads.map(work, range(2))), [2, 2])
    self.assertLess(time.monotonic() - started, 20)
    # A name is looked up once at a time, even if it is requested often.
    self.assertLess(self.names.asked.count('dead-7'), 5)

  @pytest.mark.smoke
  def test_unresolved_name_is_reported(self):
    message = "'dead-1' was not resolved within 0.2 s"
    with mock.patch.object(names, 'LOOK_UP_SECONDS', 0.2):
      with self.assertRaisesRegex(OSError, message):
        asyncio.run(names.resolve('dead-1', 1))
      with self.assertRaisesRegex(OSError, message):
        names.resolve_now('dead-1', 1)

  def test_lookup_of_own_name_has_a_deadline(self):
    settings = options.GroupOptions(secret=b'a secret of this test')
    with (
      mock.patch.object(names, 'LOOK_UP_SECONDS', 0.1),
      mock.patch.object(server, '_NAMELESS_SECONDS', 0.3),
      self.assertRaisesRegex(errors.RendezvousError, 'dead-0'),
    ):
      rendezvous.Rendezvous({0: 'dead-0:1'}, 0, settings)


if __name__ == '__main__':
  absltest.main()

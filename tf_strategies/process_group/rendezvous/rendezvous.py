"""Owns the address of a process and forms groups of the processes it finds."""

import asyncio
import contextlib
import ipaddress
import math
import os
import secrets
import socket
from collections.abc import Callable, Mapping

from absl import logging

from tf_strategies import errors, option_checks
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import (
  local_users,
  protocol,
  server,
  sockets,
)
from tf_strategies.process_group.rendezvous import formation, membership

_Kind = protocol.Kind
_POLL_SECONDS = 0.1
# After a death the other workers are present: at first they ask more often.
_FIRST_POLL_SECONDS = 0.01
# With many workers each is asked less often.
_POLL_SECONDS_PER_WORKER = 0.002
# Well below the time for which an answer counts.
_MOST_POLL_SECONDS = membership.FRESH_SECONDS / 3
# Rank 0 has a link to each for polls, for control and for data; and its pipelines.
_DESCRIPTORS_PER_WORKER = 4
# Between two looks at what else may end a wait.
_CHECK_SECONDS = 1.0
# Between two looks of a group at tasks that are not in it.
_WATCH_SECONDS = 5.0
# A worker that refuses tells the others for this long before it raises.
_REFUSAL_SECONDS = 1.0
# Silence after which a connection that only polls is given up.
_IDLE_SECONDS = 30.0
# A data pipeline, say, may hold many files for a moment.
_SHORTAGE_SECONDS = 5.0
_SHORTAGE_GAP_SECONDS = 2.0


class Rendezvous:
  """Owns this process's address of the cluster for the life of the process.

  While a group runs, the address stays open: a worker that was started again
  polls it, and waits until the group forms again.

  Example:

    >>> with Rendezvous({0: '127.0.0.1:0'}, 0) as meeting:
    ...   with meeting.form() as group:
    ...     print(*group.members)
    rank 0 (task 0 at 127.0.0.1:0)

  Args:
    addresses: 'host:port' of each task; the same on all workers.
    task: number of this process.
    options: deadlines and the number of workers; the defaults if None.
    listener: a socket that listens at the address already; None to open one.
    make_group: makes a group from the arguments of `ProcessGroup`.

  Raises:
    ClusterConfigError: an address is malformed.
    UnsupportedOptionError: addresses beyond this host without a secret.
    RendezvousError: this process cannot listen at its address.
  """

  def __init__(
    self,
    addresses: Mapping[int, str],
    task: int,
    options: options_lib.GroupOptions | None = None,
    listener: socket.socket | None = None,
    make_group: Callable[..., group_lib.ProcessGroup] = group_lib.ProcessGroup,
  ):
    self._options = options or options_lib.GroupOptions()
    _check_addresses(addresses, self._options)
    incarnation = (
      f'{socket.gethostname()} process {os.getpid()} {secrets.token_hex(4)}'
    )
    self._membership = membership.MembershipTable(
      addresses, task, incarnation, self._options
    )
    self._addresses = self._membership.addresses
    self._task = task
    self._make_group = make_group
    self._group: group_lib.ProcessGroup | None = None
    self._proposal: formation.Proposal | None = None  # In the making.
    self._last_proposal: formation.Proposal | None = None
    self._formed: asyncio.Future | None = None
    # First and last time at which this process had no file descriptor left.
    self._short = (-math.inf, -math.inf)
    sockets.allow(_DESCRIPTORS_PER_WORKER * len(addresses))
    self._server = server.Server(
      addresses[task],
      task,
      self._options,
      {
        _Kind.HELLO: self._answer,
        _Kind.PROPOSE: self._follow,
        _Kind.JOIN: self._accept_data,
      },
      self._run_short,
      len(addresses),
      listener,
    )

  def form(
    self,
    progress: int = 0,
    is_closed: bool = False,
    may_be_alone: bool = True,
    check: Callable[[], None] = lambda: None,
  ) -> group_lib.ProcessGroup:
    """Blocks until a group has formed that this process is in.

    May be called again after a failure, or to let joiners in: a group that
    still runs is closed first. The new group has all workers that are there, at
    least `min_workers`, and a higher generation; ranks follow the tasks. All see
    in `members` how far each has come: its `progress`.

    The deadline does not run while others are in a group: a new worker waits until they
    let it in, or have ended.

    Args:
      progress: progress of this process.
      is_closed: whether only members of the last group, in the same processes, may be
        in it.
      may_be_alone: whether this process may form a group of one.
      check: function that is called each second meanwhile, and may raise an error.

    Raises:
      RendezvousError: workers are missing at the deadline, or run another
        version.
      ClusterConfigError: workers have different addresses.
      AuthenticationError: no other worker has this one's secret.
    """
    self._leave()
    self._group = self._server.call(
      self._form(progress, is_closed, may_be_alone, check)
    )
    return self._group

  def close(self) -> None:
    """Closes the group, if there is one, and releases the address."""
    self._leave()
    self._server.close()

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def _leave(self) -> None:
    group, self._group = self._group, None
    if group is not None:
      group.close()

  # From here on everything runs in the server's loop.

  async def _form(
    self, progress, is_closed, may_be_alone, check
  ) -> group_lib.ProcessGroup:
    members = self._membership
    members.start(progress, is_closed, may_be_alone, _now())
    formed = self._formed = self._server.loop.create_future()
    tasks = [
      self._server.spawn(self._poll_some()),
      self._server.spawn(self._lead()),
    ]
    try:
      seconds = self._options.rendezvous_timeout_seconds
      ends_at = _now() + seconds
      while not formed.done():
        check()
        now = _now()
        if running := members.sees_running(now):
          ends_at = now + seconds
          logging.log_every_n_seconds(
            logging.INFO, 'Waiting for the group of tasks %s.', 30, running
          )
        elif now >= ends_at:
          raise members.timeout_error(now, seconds)
        left = min(ends_at - now, _CHECK_SECONDS)
        await asyncio.wait([formed], timeout=left)
      if formed.exception() is not None:
        members.state = membership.Activity.REFUSED
        members.refusal = str(formed.exception())
        await asyncio.sleep(_REFUSAL_SECONDS)
    finally:
      self._formed = None
      await connection_lib.end(tasks)
      if members.state is not membership.Activity.RUNNING:
        members.state = membership.Activity.IDLE
    return formed.result()

  def _refuse(self, error: Exception) -> None:
    """Ends `form` with an error that no waiting can fix."""
    if self._formed is not None and not self._formed.done():
      self._formed.set_exception(error)

  async def _dial(self, task: int) -> connection_lib.Connection:
    return await connection_lib.dial(
      self._addresses[task], self._task, task, self._options
    )

  def _run_short(self, error: errors.ResourceLimitError) -> None:
    """Gives up if file descriptors stay away: no other worker is to blame."""
    now = _now()
    since, last = self._short
    since = since if now - last < _SHORTAGE_GAP_SECONDS else now
    self._short = since, now
    if now - since > _SHORTAGE_SECONDS:
      self._refuse(error)

  async def _poll_some(self) -> None:
    """Polls the workers whose state this process has to know."""
    polls: dict[int, asyncio.Task] = {}
    try:
      while True:
        wanted = set(self._membership.polled(_now()))
        for task in wanted - polls.keys():
          polls[task] = self._server.spawn(self._poll(task))
        for task in polls.keys() - wanted:
          polls.pop(task).cancel()
        await asyncio.sleep(self._pause() / 2)
    finally:
      await connection_lib.end(polls.values())

  async def _poll(self, task: int) -> None:
    """Polls the state of one worker."""
    while True:
      try:
        await self._ask(task)
      except errors.AuthenticationError as e:
        self._membership.lost(task, str(e), refused=True)
        logging.log_every_n_seconds(logging.WARNING, '%s', 10, e)
        if self._membership.all_refuse(_now()):
          self._refuse(e)
      except errors.ResourceLimitError as e:
        self._run_short(e)
        self._membership.lost(task, f'it could not be asked: {e}')
      except errors.Error as e:
        self._refuse(e)
      except ConnectionRefusedError:
        self._membership.lost(task, 'nobody listens there', is_gone=True)
      except ConnectionError:
        self._membership.lost(task, 'it closed the connection')
      except OSError as e:
        self._membership.lost(task, str(e) or 'it does not answer')
      except Exception as e:  # It sent what this version does not.
        self._membership.lost(task, f'something else is there: {e}')
      await asyncio.sleep(self._pause())

  def _pause(self) -> float:
    """Returns the seconds between two questions to one worker."""
    elapsed = _now() - self._membership.started_at
    return min(
      _POLL_SECONDS_PER_WORKER * len(self._addresses)
      + min(_POLL_SECONDS, _FIRST_POLL_SECONDS + elapsed / 10),
      _MOST_POLL_SECONDS,
    )

  async def _ask(self, task: int, is_once: bool = False) -> None:
    connection = await self._dial(task)
    is_first = True
    try:
      while True:
        connection.send(_Kind.HELLO, self._membership.hello(_now(), is_first))
        is_first = False
        _, message = await connection_lib.within(
          connection_lib.HANDSHAKE_SECONDS, connection.expect(_Kind.HELLO)
        )
        self._membership.heard(message, _now(), reached=True)
        if is_once:
          return
        await asyncio.sleep(self._pause())
    finally:
      connection.close()

  async def _answer(self, connection, client, message) -> None:
    """Tells a worker that polls what this one is doing."""
    with contextlib.closing(connection), contextlib.suppress(OSError):
      # Until the peer has its answer, is gone, or does not read its answers.
      while not connection.pending:
        try:
          self._membership.heard(message, _now(), reached=False)
        except errors.Error as e:
          self._refuse(e)
        is_first = bool(message['addresses'])
        connection.send(_Kind.HELLO, self._membership.hello(_now(), is_first))
        _, message = await connection_lib.within(
          _IDLE_SECONDS, connection.expect(_Kind.HELLO)
        )

  async def _lead(self) -> None:
    """Proposes groups while this process is the one to do so."""
    while True:
      members = self._membership.proposal(_now())
      if members is None or self._proposal is not None:
        await asyncio.sleep(self._pause() / 2)
        continue
      generation = self._membership.next_generation()
      if await self._take_part(generation, members, None):
        return
      self._membership.failed_at = _now()
      await asyncio.sleep(self._pause())

  async def _follow(self, connection, client, message) -> None:
    """Takes part in the proposal of another worker."""
    members = [state.Member(*member) for member in message['members']]
    generation = message['generation']
    objection = self._membership.objection(generation, members, message['gone'])
    if self._proposal is not None:
      objection = 'it takes part in another proposal'
    if objection:
      connection.send(_Kind.REJECT, objection)
      connection.close()
    else:
      await self._take_part(generation, members, connection)

  async def _take_part(self, generation, members, leader) -> bool:
    """Runs a proposal; `leader` is None on the one that leads it."""
    self._proposal = self._last_proposal = proposal = formation.Proposal(
      generation, members, self._membership, self._dial
    )
    try:
      if leader is None:
        await proposal.lead()
      else:
        await proposal.follow(leader)
    except BaseException as e:
      proposal.close()
      if not isinstance(e, OSError | protocol.ProtocolError | errors.Error):
        raise
      logging.info('Group %d did not form: %s', generation, str(e) or repr(e))
      return False
    finally:
      self._proposal = None
    try:
      self._complete(proposal)
    except Exception as e:  # Nobody is to wait for it in vain.
      proposal.close()
      self._refuse(e)
    return True

  async def _accept_data(self, connection, client, message) -> None:
    """Takes a data link of the proposal or group that this process is in."""
    if self._last_proposal is None:
      raise protocol.ProtocolError('a data link belongs to no group')
    self._last_proposal.accept(connection, message)

  def _complete(self, proposal: formation.Proposal) -> None:
    """Makes the group of a proposal that all members have confirmed."""
    if self._formed is None or self._formed.done():
      proposal.close()
      return
    members, options = self._membership, self._options
    group_state = proposal.state
    members.formed(group_state.generation, proposal.seated)
    plane = control_plane.ControlPlane(
      self._server,
      group_state,
      proposal.connections,
      options,
      lambda: members.joiners(self._server.now()),
    )

    def connect(ranks):
      return asyncio.run_coroutine_threadsafe(
        proposal.connect(ranks), self._server.loop
      )

    group = self._make_group(
      group_state, proposal.transport, plane, options, connect
    )
    group_state.on_failure(self._on_end)
    place = group.generation, group.rank, group.world_size
    logging.info('Group %d: rank %d of %d', *place)
    if group.rank == 0 and len(members.addresses) > group.world_size:
      self._server.spawn(self._watch_others(group_state, plane))
    self._formed.set_result(group)

  async def _watch_others(self, group_state, plane) -> None:
    """Gives way if others of this job have formed a group too."""
    members = self._membership
    seated = {member.task for member in group_state.members}

    while not group_state.failed.is_set():
      await asyncio.sleep(_WATCH_SECONDS)
      if members.state is not membership.Activity.RUNNING:
        return
      others = [t for t in members.views if t not in seated]
      questions = (self._ask(task, is_once=True) for task in others)
      await asyncio.gather(*questions, return_exceptions=True)
      rival = members.rival_group(_now())
      if rival is not None:
        view = members.views[rival]
        plane.end(
          state.FailureReport(
            'WorkerUnavailableError',
            f'Task {rival} and others, {view.size} in all, form a group of this job '
            f'beside this one of {len(seated)}, which gives way. Form the group '
            'again; with min_workers of a majority there is one.',
            address=self._addresses[rival],
          )
        )

  def _on_end(self) -> None:
    # From any thread: one assignment, and `form` sets it again.
    if self._membership.state is membership.Activity.RUNNING:
      self._membership.state = membership.Activity.IDLE


def _now() -> float:
  """Returns the time of the running loop. The server may not exist yet."""
  return asyncio.get_running_loop().time()


def _check_addresses(
  addresses: Mapping[int, str], options: options_lib.GroupOptions
) -> None:
  """Raises an error where these can never form a group.

  Raises:
    ClusterConfigError: an address is malformed.
    UnsupportedOptionError: addresses that need a secret; more workers than there are.
  """
  same_user = options.same_user
  for number, address in addresses.items():
    host, _ = connection_lib.split_address(address)
    option_checks.check(
      not same_user or _is_loopback(host),
      f'{address} of task {number}',
      'addresses of this host (127.0.0.1, ::1, localhost) without a secret',
      'set TFS_SECRET (or TFS_SECRET_FILE) on all workers and use '
      'GroupOptions.from_env(); or pass allow_unauthenticated=True where '
      'the network keeps everybody else out',
    )
  option_checks.check(
    not same_user or local_users.is_known(),
    'a group without one',
    'a secret on this operating system',
    'set TFS_SECRET to the same 16 bytes or more on all workers and use '
    'GroupOptions.from_env(); or pass allow_unauthenticated=True. The '
    'system does not tell whose process a connection comes from',
  )
  minimum = options.min_workers
  option_checks.check(
    not option_checks.is_int(minimum) or minimum <= len(addresses),
    f'min_workers={minimum}',
    f'min_workers of at most {len(addresses)}, the number of addresses',
    'lower it, or add addresses',
  )


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'

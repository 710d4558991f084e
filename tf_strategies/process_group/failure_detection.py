"""Who is to blame when a collective does not work out.

Pure functions over what the ranks say that they are doing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_strategies.process_group import group, state

# How many ranks a message spells out.
_NAMED = 4


def mismatch(
  members: Sequence[group.Member],
  accusation: Mapping[str, Any],
  said: Mapping[int, Mapping[str, Any]],
) -> state.Verdict:
  """The verdict on ranks that are at different collectives.

  Args:
    members: of the group.
    accusation: 'accuser', 'peer', 'sequence', 'name', and what the accuser
      expected ('expected') and got ('received').
    said: for each rank that answered, `GroupState.describe()`.
  """
  sequence = accusation['sequence']
  texts = {
    rank: description['recent'][str(sequence)]
    for rank, description in sorted(said.items())
    if str(sequence) in description['recent']
  }
  first = min(texts, default=accusation['accuser'])
  differing = tuple(r for r, text in texts.items() if text != texts[first])
  if differing:
    shown = [first, *differing[:_NAMED]]
    told = '; '.join(f'{members[r]} does {texts[r]}' for r in shown)
  else:
    # The peer is at a sequence number that it has forgotten, or died since.
    differing = (accusation['peer'],)
    told = (
      f'{members[accusation["accuser"]]} does {accusation["expected"]}; '
      f'{members[accusation["peer"]]} sent {accusation["received"]}'
    )
  return state.Verdict(
    'CollectiveMismatchError',
    f'The ranks disagree on collective {sequence}: {told}. All ranks must '
    'call the same collectives in the same order, with the same names, dtypes '
    'and sizes.',
    rank=differing[0],
    address=members[differing[0]].address,
    tensor=accusation['name'] or None,
    step=sequence,
    ranks=differing,
  )


def timeout(
  members: Sequence[group.Member],
  accusation: Mapping[str, Any],
  said: Mapping[int, Mapping[str, Any]],
) -> state.Verdict:
  """The verdict on a collective that did not finish in time.

  Args:
    members: of the group.
    accusation: 'text', 'sequence', 'name', 'seconds', and the ranks that the
      accuser waited for directly ('waiting').
    said: for each rank that answered, `GroupState.describe()`.
  """
  sequence = accusation['sequence']
  late = [
    rank
    for rank in range(len(members))
    if rank not in said or said[rank]['sequence'] < sequence
  ]
  if late:
    why = '; '.join(_where(members, said, rank) for rank in late[:_NAMED])
  else:
    late = list(accusation['waiting']) or [0]
    why = 'all ranks are there, but the bytes do not move: waiting for ' + (
      ', '.join(str(members[rank]) for rank in late[:_NAMED])
    )
  return state.Verdict(
    'CollectiveTimeoutError',
    f'{accusation["text"]} (sequence {sequence}) did not finish within '
    f'{accusation["seconds"]:g} s, though all workers are alive: {why}. Look '
    'at what that worker does, or raise collective_timeout_seconds.',
    rank=late[0],
    address=members[late[0]].address,
    tensor=accusation['name'] or None,
    step=sequence,
  )


def _where(
  members: Sequence[group.Member],
  said: Mapping[int, Mapping[str, Any]],
  rank: int,
) -> str:
  description = said.get(rank)
  if description is None:
    return f'{members[rank]} does not say where it is'
  last = description['sequence']
  text = description['recent'].get(str(last), 'nothing yet')
  verb = 'is still in' if description['busy'] else 'was last in'
  return f'{members[rank]} has not arrived: it {verb} {text} (sequence {last})'

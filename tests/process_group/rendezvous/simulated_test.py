"""The rendezvous of up to 1,000 processes, and of few under many faults.

Simulated: the clock, the sockets and what becomes of processes and hosts. The
protocol is the package's own; see `simulated_network`.
"""

import asyncio
import os
import random
import statistics

from absl.testing import absltest, parameterized

from tests import tiers
from tests.process_group import simulated_network
from tf_strategies import process_group

_SEED = int(os.environ.get('TFS_SEED', '20261123'))
_CASES = int(os.environ.get('TFS_CASES', '20'))
_OPTIONS = {'secret': b'of a simulated job', 'min_workers': 'majority'}


def _members(process):
  return [m.task for m in process.group.members]


async def _wait_until(condition, seconds):
  loop = asyncio.get_running_loop()
  end = loop.time() + seconds
  while not condition():
    if loop.time() > end:
      raise AssertionError(f'not within {seconds} s: {condition.__doc__}')
    await asyncio.sleep(0.05)


async def _form(count, missing, lost, seed):
  """Forms a group of those that there are; its figures."""
  rng = random.Random(seed)
  absent = set(rng.sample(range(1, count), missing))
  options = process_group.GroupOptions(
    rendezvous_timeout_seconds=300.0, **_OPTIONS
  )
  with simulated_network.Network(count, seed, lost) as network:
    # Of some of the missing not even the host is there.
    network.silent.update(t for t in absent if t % 2)
    began = network.loop.time()
    processes = []
    for task in network.addresses:
      if task not in absent:
        processes.append(simulated_network.Process(network, task, options))
    searches = []
    for process in processes:
      await asyncio.sleep(0.0 if count < 100 else rng.uniform(0, 2.0 / count))
      searches.append(process.spawn(process.form))
    await asyncio.gather(*searches)
    return {
      'errors': [str(p.error) for p in processes if p.error],
      'groups': {(p.group.generation, *_members(p)) for p in processes},
      'there': [p.task for p in processes],
      'seconds': max(p.formed_at for p in processes) - began,
      'messages': [p.sent for p in processes],
      'descriptors': [p.most_open for p in processes],
    }


class FormationTest(parameterized.TestCase):
  @tiers.parameters(
    (3, 0, 0.0),
    (40, 2, 0.02),
    tiers.full(200, 10, 0.02),
    tiers.soak(1000, 0, 0.0),
    tiers.soak(1000, 50, 0.02),
  )
  def test_those_that_are_there_form_one_group(self, count, missing, lost):
    formed = simulated_network.run(_form, count, missing, lost, _SEED)
    self.assertEqual(formed['errors'], [])
    [(_, *tasks)] = formed['groups']
    self.assertEqual(tasks, formed['there'])
    messages, open_ = sorted(formed['messages']), sorted(formed['descriptors'])
    print(
      f'{count}, {missing} missing, {lost:.0%} lost: {formed["seconds"]:.1f} s; '
      f'messages of a process: median {statistics.median(messages):.0f}, '
      f'most {messages[-1]}; sockets: median {statistics.median(open_):.0f}, '
      f'tenth {open_[-10:][0]}, most {open_[-1]}'
    )
    # All have few connections, but for the lowest, of whom all ask.
    self.assertLess(statistics.median(open_), 25)
    self.assertLess(formed['seconds'], 60)


if __name__ == '__main__':
  absltest.main()

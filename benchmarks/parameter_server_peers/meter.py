"""Reads the clock and the CPU time of all tasks of a job."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import psutil


@dataclasses.dataclass(frozen=True)
class Reading:
  """What the clocks said.

  Attributes:
    seconds: of the wall clock.
    cpu_seconds: of all threads of each process, by job.
  """

  seconds: float
  cpu_seconds: Mapping[str, Sequence[float]]


class Meter:
  """Reads the clocks of some processes.

  Example:

    >>> import os
    >>> meter = Meter({'coordinator': [os.getpid()]})
    >>> found = between(meter.read(), meter.read())
    >>> found['seconds'] > 0, len(found['cpu_seconds']['coordinator'])
    (True, 1)

  Args:
    pids: process ids by job.
  """

  def __init__(self, pids: Mapping[str, Sequence[int]]):
    self._processes = {
      job: [psutil.Process(pid) for pid in of_job]
      for job, of_job in pids.items()
    }

  def read(self) -> Reading:
    """Reads all of them now."""
    cpu_seconds = {}
    for job, processes in self._processes.items():
      times = [process.cpu_times() for process in processes]
      cpu_seconds[job] = [t.user + t.system for t in times]
    return Reading(time.perf_counter(), cpu_seconds)


def between(start: Reading, end: Reading) -> dict[str, object]:
  """Returns what passed between two readings, as JSON can say it."""
  return {
    'seconds': end.seconds - start.seconds,
    'cpu_seconds': {
      job: [
        after - before
        for before, after in zip(
          start.cpu_seconds[job], end.cpu_seconds[job], strict=True
        )
      ]
      for job in start.cpu_seconds
    },
  }

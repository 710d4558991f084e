"""Starts all tasks of a job, on this host or on several: `tfs launch`.

`tasks` plans, `supervisor` runs, `process` is one attempt at a task, `reaper`
is the program around it that leaves no orphan, `output` prefixes the lines. `nodes`
connects the launchers of several hosts.

Example:

  >>> from tf_strategies.cluster import job
  >>> from tf_strategies.launch import tasks
  >>> counts = job.TaskCounts(num_workers=2).all_counts
  >>> host = tasks.HostTasks('127.0.0.1', counts, [1111, 2222])
  >>> [spec.name for spec in tasks.plan_tasks([host], ['train.py'], '5ec7e7')]
  ['worker 0', 'worker 1']
"""

from tf_strategies.launch.command import main

__all__ = ['main']

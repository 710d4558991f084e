"""Starts all tasks of a job on this host: `python -m tf_strategies.launch`.

`tasks` plans, `supervisor` runs, `process` is one attempt at a task, `reaper`
is the program around it that leaves no orphan, `output` prefixes the lines.

Example:

  >>> from tf_strategies.cluster import job
  >>> from tf_strategies.launch import tasks
  >>> specs = tasks.plan_tasks(job.Job(num_workers=2), ['python', 'train.py'],
  ...                          ports=[1111, 2222], secret='5ec7e7')
  >>> [spec.name for spec in specs]
  ['worker 0', 'worker 1']
"""

from tf_strategies.launch.command import main

__all__ = ['main']

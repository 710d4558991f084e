"""What this machine and this TF_CONFIG can do, and what to fix: `tfs doctor`.

`machine` looks at this machine, `job` at the cluster that the environment describes,
`probe` is the process that loads TensorFlow. What is right the rest of the package
knows: its own functions are called, and their errors are shown.

Example:

  >>> from tf_strategies.doctor import job
  >>> [finding.state for finding in job.look({'TF_CONFIG': 'worker 1'})]
  ['FAIL']
"""

from tf_strategies.doctor.command import main

__all__ = ['main']

"""Checks this machine and this TF_CONFIG, and says how to fix them: `tfs doctor`.

`machine` checks this machine. `job` checks the cluster that the environment describes.
`probe` is the process that loads TensorFlow. The checks call the functions that
training calls, and show their errors.

Example:

  >>> from tf_strategies.doctor import job
  >>> [finding.state for finding in job.look({'TF_CONFIG': 'worker 1'})]
  ['FAIL']
"""

from tf_strategies.doctor.command import main

__all__ = ['main']

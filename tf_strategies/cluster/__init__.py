"""Which tasks a job has and which of them this process is.

Example:

  >>> from tf_strategies import cluster
  >>> config = cluster.ClusterConfig.from_env({'TF_CONFIG': '''
  ...   {"cluster": {"worker": ["a:2222", "b:2222"]},
  ...    "task": {"type": "worker", "index": 1}}'''})
  >>> config.address
  'b:2222'
"""

from tf_strategies.cluster.config import ClusterConfig

# The function hides its module; it loads TensorFlow when it needs it.
from tf_strategies.cluster.run_task import run_task

__all__ = ['ClusterConfig', 'run_task']


def __dir__() -> list[str]:
  return __all__

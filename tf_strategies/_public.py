"""The table of the package's public names.

`tf_strategies` exports the imports of this module, and imports it when one of
these names is first used. TensorFlow takes seconds to load, and neither the
launcher nor `tfs.cluster` needs it.
"""

from tf_strategies import (
  cluster,
  data,
  errors,
  keras,
  monitoring,
  process_group,
)
from tf_strategies.cross_device import (
  AutoAllReduce,
  RingAllReduce,
  ScheduledAllReduce,
)
from tf_strategies.fault_tolerance import elastic
from tf_strategies.fault_tolerance.elastic_options import ElasticOptions
from tf_strategies.fault_tolerance.evaluator import SidecarEvaluator
from tf_strategies.fault_tolerance.run import Run
from tf_strategies.monitoring.keras_callback import MonitorCallback
from tf_strategies.strategies.central_storage.strategy import (
  CentralStorageStrategy,
)
from tf_strategies.strategies.mirrored.strategy import RingMirroredStrategy
from tf_strategies.strategies.multi_worker.collective_strategy import (
  MultiWorkerCollectiveStrategy,
)
from tf_strategies.strategies.multi_worker.options import (
  CollectiveOptions,
  RingOptions,
)
from tf_strategies.strategies.multi_worker.ring_strategy import (
  MultiWorkerRingStrategy,
)
from tf_strategies.strategies.parameter_server import ParameterServerStrategy
from tf_strategies.strategies.registry import create_strategy
from tf_strategies.strategies.tpu.strategy import TPURingStrategy

__all__ = [
  'AutoAllReduce',
  'CentralStorageStrategy',
  'CollectiveOptions',
  'ElasticOptions',
  'MonitorCallback',
  'MultiWorkerCollectiveStrategy',
  'MultiWorkerRingStrategy',
  'ParameterServerStrategy',
  'RingAllReduce',
  'RingMirroredStrategy',
  'RingOptions',
  'Run',
  'ScheduledAllReduce',
  'SidecarEvaluator',
  'TPURingStrategy',
  'cluster',
  'create_strategy',
  'data',
  'elastic',
  'errors',
  'keras',
  'monitoring',
  'process_group',
]

"""TensorFlow strategies that are exact under Keras 3.

>>> import tensorflow as tf
>>> import tf_strategies as tfs
>>> strategy = tfs.RingMirroredStrategy(devices=['CPU:0'])
>>> with strategy.scope():
...   model = tf.keras.Sequential([tf.keras.Input([3]),
...                                tf.keras.layers.Dense(1)])
...   model.compile(tfs.keras.DistributedOptimizer('adam'), 'mse')
"""

import importlib
from typing import TYPE_CHECKING, Any

from tf_strategies.version import __version__

# For readers and tools. TensorFlow takes seconds to load, and neither the
# launcher nor `tfs.cluster` needs it: what is named here is loaded when it is
# first used.
if TYPE_CHECKING:
  from tf_strategies import (
    cluster,
    collectives,
    data,
    errors,
    keras,
    monitoring,
    process_group,
  )
  from tf_strategies.cross_device import (
    AutoAllReduce,
    DirectAllReduce,
    HalvingDoublingAllReduce,
    HierarchicalRingAllReduce,
    NaiveAllReduce,
    RingAllReduce,
    ScheduledAllReduce,
    TreeAllReduce,
  )
  from tf_strategies.fault_tolerance import elastic
  from tf_strategies.fault_tolerance.elastic import ElasticOptions
  from tf_strategies.fault_tolerance.evaluator import SidecarEvaluator
  from tf_strategies.fault_tolerance.preemption import (
    Preemption,
    PreemptionCheckpoint,
  )
  from tf_strategies.fault_tolerance.resume_fit import ResumeFit
  from tf_strategies.fault_tolerance.run_checkpoint import RunCheckpoint
  from tf_strategies.monitoring.keras_callback import MonitorCallback
  from tf_strategies.strategies import (
    STRATEGY_NAMES,
    CentralStorageStrategy,
    MultiWorkerCollectiveStrategy,
    MultiWorkerRingStrategy,
    ParameterServerStrategy,
    RingMirroredStrategy,
    RingOptions,
    TPURingStrategy,
    create_strategy,
  )

__all__ = [
  'STRATEGY_NAMES',
  'AutoAllReduce',
  'CentralStorageStrategy',
  'DirectAllReduce',
  'ElasticOptions',
  'HalvingDoublingAllReduce',
  'HierarchicalRingAllReduce',
  'MonitorCallback',
  'MultiWorkerCollectiveStrategy',
  'MultiWorkerRingStrategy',
  'NaiveAllReduce',
  'ParameterServerStrategy',
  'Preemption',
  'PreemptionCheckpoint',
  'ResumeFit',
  'RingAllReduce',
  'RingMirroredStrategy',
  'RingOptions',
  'RunCheckpoint',
  'ScheduledAllReduce',
  'SidecarEvaluator',
  'TPURingStrategy',
  'TreeAllReduce',
  '__version__',
  'cluster',
  'collectives',
  'create_strategy',
  'data',
  'elastic',
  'errors',
  'keras',
  'monitoring',
  'process_group',
]

_ROOMS = (
  'cluster',
  'collectives',
  'data',
  'errors',
  'keras',
  'monitoring',
  'process_group',
)
_HOMES = {
  'ElasticOptions': 'fault_tolerance.elastic',
  'MonitorCallback': 'monitoring.keras_callback',
  'Preemption': 'fault_tolerance.preemption',
  'PreemptionCheckpoint': 'fault_tolerance.preemption',
  'RunCheckpoint': 'fault_tolerance.run_checkpoint',
  'STRATEGY_NAMES': 'strategies',
  'SidecarEvaluator': 'fault_tolerance.evaluator',
  'create_strategy': 'strategies',
  'ResumeFit': 'fault_tolerance.resume_fit',
  'RingOptions': 'strategies',
}


def __getattr__(name: str) -> Any:
  if name in _ROOMS:
    return importlib.import_module(f'tf_strategies.{name}')
  if name == 'elastic':
    return importlib.import_module('tf_strategies.fault_tolerance.elastic')
  if name not in __all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  home = _HOMES.get(name)
  if home is None:
    home = 'strategies' if name.endswith('Strategy') else 'cross_device'
  return getattr(importlib.import_module(f'tf_strategies.{home}'), name)


def __dir__() -> list[str]:
  return sorted(__all__)

"""A user's program in which a type checker must not find any mistake."""

import keras
import numpy as np

import tf_strategies as tfs
from tf_strategies.keras import LocalSteps


def make_callbacks(directory: str) -> list[keras.callbacks.Callback]:
  monitor = tfs.MonitorCallback(timeline=directory + '/run.json')
  checkpoint = keras.callbacks.ModelCheckpoint(directory)
  return [monitor, tfs.keras.ChiefOnly(checkpoint)]


def train(directory: str) -> int:
  options = tfs.RingOptions(compression='bfloat16', bucket_bytes=1 << 20)
  strategy = tfs.MultiWorkerRingStrategy(options=options, devices=['CPU:0'])
  with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(LocalSteps('adam', every=4), 'mse')
  run = tfs.Run(directory, model)
  position = run.restore()
  model.fit(np.ones([8, 3]), np.ones([8, 1]), callbacks=make_callbacks('logs'))
  run.save(position.epoch + 1)
  return position.step


def train_elastically(job: tfs.elastic.Job) -> float:
  with job.strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
  job.restore(model)
  return 0.5


def read(rank: int) -> tfs.data.PipelineOptions:
  return tfs.data.PipelineOptions(global_batch_size=32 * (rank + 1))


def main() -> None:
  step: int = tfs.cluster.run_task(lambda: train('checkpoints'))
  loss: float = tfs.elastic.run(
    train_elastically, tfs.ElasticOptions(min_workers=1)
  )
  print(step, loss, tfs.__version__)
  tfs.create_strategy('parameter_server', mode='sync', checkpoint_dir='c')
  tfs.RingMirroredStrategy(cross_device_ops=tfs.RingAllReduce())
  tfs.CentralStorageStrategy(parameter_device='CPU:0')
  try:
    tfs.ParameterServerStrategy(mode='bounded', max_staleness=2)
  except tfs.errors.ParameterServerUnavailableError as e:
    server: int | None = e.server
    print(server)


if __name__ == '__main__':
  main()

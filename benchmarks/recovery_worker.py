"""A worker of `benchmarks.recovery`: trains until it is ended, and says when.

  python -m benchmarks.recovery_worker ours /tmp/steps_0 0 64
  python recovery_worker.py lighthouse /tmp/address 0 64
  python recovery_worker.py torchft /tmp/steps_0 0 64 http://localhost:29510

After each step that all workers have committed it writes a line: the time, how many
workers took part, and the number of the step. With torch it imports nothing else.
"""

import sys
import time

_FEATURES = 64
_ROWS = 48


def rows(step):
  """The batch of a step, the same on all workers."""
  import numpy as np

  generator = np.random.default_rng(step)
  x = generator.normal(size=(_ROWS, _FEATURES)).astype(np.float32)
  return x, x.sum(1, keepdims=True)


def run_ours(file, width):
  """An elastic job of `fit`; its cluster is in TF_CONFIG."""
  import keras
  import tensorflow as tf

  import tf_strategies as tfs

  class Tell(keras.callbacks.Callback):
    """Writes a line after each step."""

    def __init__(self, job):
      super().__init__()
      self._job = job

    def on_train_batch_end(self, batch, logs=None):
      file.write(f'{time.time()} {self._job.strategy.num_workers} {batch}\n')

  def batches(epoch, step):
    del epoch
    x, y = rows(0)
    del step
    return tf.data.Dataset.from_tensors((x, y)).repeat()

  def train(job):
    with job.strategy.scope():
      model = keras.Sequential(
        [
          keras.layers.Input([_FEATURES]),
          keras.layers.Dense(width, 'relu'),
          keras.layers.Dense(width, 'relu'),
          keras.layers.Dense(1),
        ]
      )
      model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), 'mse')
    job.restore(model)
    job.fit(model, batches, 1, 10**6, [Tell(job)], verbose=0)

  tfs.elastic.run(train, tfs.ElasticOptions(max_failures=10**6))


def run_torchft(file, width, rank, lighthouse):
  """The same model with TorchFT's manager over gloo."""
  import datetime

  import torch
  import torchft

  torch.set_num_threads(1)
  model = torch.nn.Sequential(
    torch.nn.Linear(_FEATURES, width),
    torch.nn.ReLU(),
    torch.nn.Linear(width, width),
    torch.nn.ReLU(),
    torch.nn.Linear(width, 1),
  )
  optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
  timeout = datetime.timedelta(seconds=10)
  store = torch.distributed.TCPStore(
    'localhost', 0, is_master=True, wait_for_workers=False
  )

  def load(state):
    model.load_state_dict(state['model'])
    optimizer.load_state_dict(state['optimizer'])

  manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timeout),
    load_state_dict=load,
    state_dict=lambda: {
      'model': model.state_dict(),
      'optimizer': optimizer.state_dict(),
    },
    min_replica_size=1,
    replica_id=f'worker_{rank}',
    lighthouse_addr=lighthouse,
    store_addr='localhost',
    store_port=store.port,
    rank=0,
    world_size=1,
    timeout=timeout,
    quorum_timeout=datetime.timedelta(seconds=30),
  )
  # Not its DistributedDataParallel, which in 0.2.0 raises an AssertionError where
  # a collective fails: all gradients in one tensor, as its documentation has it.
  steps = torchft.Optimizer(manager, optimizer)
  parameters = list(model.parameters())
  x, y = (torch.from_numpy(part) for part in rows(0))
  while True:
    # TorchFT does not cut a batch among who is there: each takes a third.
    mine = slice(rank * _ROWS // 3, (rank + 1) * _ROWS // 3)
    before = manager.current_step()
    steps.zero_grad()
    torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
    flat = torch.cat([p.grad.flatten() for p in parameters])
    manager.allreduce(flat).wait()
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
      parameter.grad = part.view_as(parameter)
    steps.step()
    if manager.current_step() > before:
      number, workers = manager.current_step(), manager.num_participants()
      file.write(f'{time.time()} {workers} {number}\n')


def run_lighthouse(file):
  """TorchFT's coordinator, with short deadlines; writes its address."""
  from torchft import coordination

  server = coordination.LighthouseServer(
    bind='[::]:0',
    min_replicas=1,
    join_timeout_ms=100,
    quorum_tick_ms=20,
    heartbeat_timeout_ms=500,
  )
  file.write(f'{server.address()}\n')
  while True:
    time.sleep(1)


def main(peer, path, rank, width, *lighthouse):
  """See above."""
  with open(path, 'a', 1, encoding='utf-8') as file:
    if peer == 'ours':
      run_ours(file, int(width))
    elif peer == 'lighthouse':
      run_lighthouse(file)
    else:
      run_torchft(file, int(width), int(rank), *lighthouse)


if __name__ == '__main__':
  main(*sys.argv[1:])

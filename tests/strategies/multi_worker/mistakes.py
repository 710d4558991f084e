"""Common mistakes in programs for several workers, selected by the argument."""

import sys

import keras
import numpy as np

import tf_strategies as tfs

strategy = tfs.create_strategy('multi_worker_ring')
x = np.random.default_rng(0).normal(size=[32, 4]).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
with strategy.scope():
  model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
  model.compile('sgd', 'mse')
is_first = strategy.rank == 0
mistake = sys.argv[1]
if mistake == 'rows':
  x, y = x[strategy.rank :: 2], y[strategy.rank :: 2]
if mistake == 'rate' and is_first:
  model.optimizer.learning_rate = 0.5
if mistake == 'own_train_function':
  model.train_function = lambda iterator: model.train_step(next(iterator))
model.fit(x, y, verbose=0)
if mistake == 'fit' and is_first:
  model.fit(x, y, verbose=0)
if mistake in ('evaluate', 'evaluate_then_fit') and is_first:
  model.evaluate(x, y, verbose=0)
elif mistake == 'crash' and not is_first:
  raise ValueError('the disk of this worker is full')
if mistake in ('evaluate_then_fit', 'crash'):
  model.fit(x, y, verbose=0)
print('has ended')

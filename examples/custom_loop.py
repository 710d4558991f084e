"""Trains in a hand-written loop, on one worker or several.

  python examples/custom_loop.py
  tfs launch --num_workers=2 -- python examples/custom_loop.py

It needs scikit-learn (`pip install '.[examples]'`).
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_strategies as tfs


def main():
  """Trains, and prints the last loss and the accuracy of each epoch."""
  keras.utils.set_random_seed(1)
  strategy = tfs.create_strategy('multi_worker_ring')
  with strategy.scope():
    layers = [keras.layers.Dense(64, 'relu'), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input([64]), *layers])
    optimizer = keras.optimizers.Adam(3e-3, global_clipnorm=1.0)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
  loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  @strategy.step  # Written for one device: it sees the global batch.
  def step(x, y):
    with tf.GradientTape() as tape:
      logits = model(x, training=True)
      loss = loss_fn(y, logits)
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(loss, weights), weights)
    accuracy.update_state(y, logits)
    return loss

  x, y = load_digits(return_X_y=True)
  data = tf.data.Dataset.from_tensor_slices((x / 16, y))
  batches = data.shuffle(len(y), seed=1).batch(64).prefetch(tf.data.AUTOTUNE)
  for epoch in range(10):
    for batch in strategy.experimental_distribute_dataset(batches):
      loss = step(*batch)
    # Read it on all workers: the result sums over their rows.
    result = accuracy.result()
    accuracy.reset_state()
    if strategy.extended.should_checkpoint:  # The chief.
      print(f'epoch {epoch}: last loss {loss:.3f}, accuracy {result:.3f}')


if __name__ == '__main__':
  main()

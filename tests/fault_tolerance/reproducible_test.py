"""Workers that die and come back leave no trace in any bit of the result."""

import functools
import os
import random
import time

import keras
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tiers, virtual_devices
from tests.fault_tolerance import elastic_case
from tests.strategies import reproducible_program
from tf_strategies import errors

virtual_devices.configure()


# The soak test kills so often in each of four trainings: a single one with 20 kills
# would take longer than a test may.
_KILLS = 5


class _Workers(elastic_case.Workers):
  """Workers whose steps take their time until they may hurry."""

  def __init__(self, epochs: int, deadline: float, seconds_a_step: float):
    super().__init__(
      reproducible_program.train_elastically,
      tfs.ElasticOptions(min_workers=1, window_seconds=1),
      epochs,
      seconds_a_step,
      deadline=deadline,
    )

  def wait_for_training(self, count: int) -> list[int]:
    """Waits until so many workers train; which do, since they began.

    Raises:
      AssertionError: one has ended.
    """
    while True:
      ranks = range(elastic_case.COUNT)
      if ended := [r for r in ranks if not self.processes.is_alive(r)]:
        raise AssertionError(f'workers {ended} ended: {self.processes.wait()}')
      training = [r for r in ranks if self.steps(r)]
      if len(training) >= count:
        return training
      time.sleep(0.01)

  def hurry(self) -> None:
    """Lets steps take as long as they take from now on."""
    open(self.path(reproducible_program.HURRY), 'x').close()


@functools.cache
def _want(epochs):
  """Returns the result of one undisturbed process."""
  strategy = tfs.RingMirroredStrategy(
    virtual_devices.names(1), reproducible=reproducible_program.ELASTIC_SHARDS
  )
  return reproducible_program.train_alone(strategy, epochs)


class ReproducibleElasticTest(tf.test.TestCase, parameterized.TestCase):
  def assert_digests(self, outcomes, want):
    """Checks that the workers have the wanted bits; returns their groups' sizes."""
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
      self.assertIsNotNone(outcome.value, f'worker {outcome.rank}')
      self.assertEqual(outcome.value[0], want)
    sizes = [[g.world_size for g in o.value[1]] for o in outcomes]
    print(f'sizes of groups: {sizes}')
    return sizes

  @tiers.named_parameters(
    *tiers.every(tiers.soak, [(f'part_{i}', i) for i in range(20 // _KILLS)])
  )
  def test_20_kills(self, part):
    # TensorFlow's test case gives `random` the same seed in every run.
    drawn = random.SystemRandom().randrange(10**6)
    seed = int(os.environ.get('TFS_SEED', drawn))
    print(f'TFS_SEED={seed}')
    chance = random.Random(f'{seed} {part}')
    # Far more than are done until the last kill.
    epochs = 120
    want = _want(epochs)
    began = time.monotonic()
    with _Workers(epochs, 800, 1.0) as workers:
      for i in range(_KILLS):
        # Somebody keeps the state, who may be one that has come back.
        victim = chance.choice(workers.wait_for_training(2))
        time.sleep(chance.uniform(0, 2))
        workers.kill(victim, 1, restarts=True)
        print(f'kill {i}: {victim}, {time.monotonic() - began:.0f} s')
      workers.wait_for_training(elastic_case.COUNT)
      workers.hurry()
      outcomes = workers.processes.wait()
    print(f'ended after {time.monotonic() - began:.0f} s')
    sizes = self.assert_digests(outcomes, want)
    # The last one that came back was there at the end.
    self.assertEqual({s[-1] for s in sizes}, {elastic_case.COUNT})

  def test_batch_that_follows_the_workers_is_refused(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "batch='per_replica'"
    ):
      tfs.elastic.run(
        lambda job: None,
        tfs.ElasticOptions(batch='per_replica'),
        ring=tfs.RingOptions(reproducible=True),
      )

  def test_random_numbers_that_a_process_counts_are_refused(self):
    """A worker that comes back would draw others."""
    keras.utils.set_random_seed(1)
    batches = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.ones([4, 1])))

    def train(job):
      with job.strategy.scope():
        noise = keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)))
        model = keras.Sequential(
          [keras.layers.Input([3]), noise, keras.layers.Dense(1)]
        )
        model.compile('sgd', 'mse')
      job.restore(model)
      job.fit(model, lambda *_: batches, 1, 1, verbose=0)

    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'tfs.elastic.run.*SeedGenerator'
    ):
      tfs.elastic.run(train, ring=tfs.RingOptions(reproducible=True))


if __name__ == '__main__':
  tf.test.main()

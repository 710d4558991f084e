"""How a job of one worker counts its steps, and calls `fit`."""

import itertools
import json
import os
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tests.fault_tolerance import elastic_program
from tests.programs import common
from tf_strategies import errors
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import elastic_job, elastic_members
from tf_strategies.strategies.multi_worker import elastic

virtual_devices.configure()

_STEPS = 4


def _make_batches(epoch, step, epochs=3):
  rows = np.ones([2 * (epochs * _STEPS - epoch * _STEPS - step), 3], np.float32)
  return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(2)


class _Heard(keras.callbacks.Callback):
  """What a callback hears."""

  def __init__(self, stops=False):
    super().__init__()
    self.events = []
    self._stops = stops

  def on_train_begin(self, logs=None):
    self.events.append('begin')

  def on_epoch_end(self, epoch, logs=None):
    self.events.append(epoch)
    self.model.stop_training = self._stops

  def on_train_end(self, logs=None):
    self.events.append('end')


class JobTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rendezvous = tfs.process_group.Rendezvous({0: '127.0.0.1:0'}, 0)
    self.addCleanup(rendezvous.close)
    self.job = elastic_job.Job(tfs.ElasticOptions(), rendezvous, 1)
    strategy = elastic.ElasticRingStrategy(
      self.job, tfs.RingOptions(), devices=['CPU:0']
    )
    self.addCleanup(strategy.close)
    self.job._state.begin(strategy)
    with strategy.scope():
      self.model = common.linear(3, 1)
      self.model.compile('sgd', 'mse', jit_compile=False)

  def _apply(self):
    """Does one step of a custom loop."""
    self.model.optimizer.iterations.assign_add(1)

  def test_steps_of_a_loop_count_once(self):
    self.job.restore(self.model)
    for step in range(5):
      self._apply()
      self.job.update(0, step + 1)
    self._apply()  # The worker hears of a death before it could tell.
    self.job._state.hold()
    self.assertEqual(self.job.position, Position(0, 6))

  def test_worker_far_behind_takes_state_and_position(self):
    """Checks that it calls the function again with both, even if it is then alone."""
    self.job.restore(self.model)
    self.job.update(0, 3)
    state = self.job._state
    iterations = state.describe().index('int64[]')
    tasks = [mock.Mock(rank=i, progress=state.order + i) for i in range(2)]
    group = mock.Mock(rank=0, members=tasks)

    def exchange(tag, value):
      answer = value
      if tag == 'elastic/state':
        answer = {**value, 'position': [2, 3], 'iterations': 9}
        answer['steps'] = state.num_steps + 6
      return [value, answer]

    def broadcast(array, root, name):
      is_count = name == f'elastic/variables/{iterations}'
      return np.int64(9) if is_count else array

    group.exchange, group.broadcast = exchange, broadcast
    with self.assertRaisesRegex(elastic_members.CallAgain, '6 steps behind'):
      self.job._synchronise(group, 'train')
    state.hold()
    self.assertEqual(state.position, Position(2, 3))

  def test_state_that_nobody_has_any_more_is_reported(self):
    with (
      mock.patch.dict(os.environ, {'TFS_RESTART_COUNT': '1'}),
      self.assertLogs(level='WARNING') as logs,
    ):
      self.job.restore(self.model)
      self.assertEqual(self.job.position, Position())
    self.assertIn('begins again', ''.join(logs.output))

  def test_loop_that_does_not_restore_is_refused(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'call job.restore'
    ):
      self.job.update(0, 1)

  def test_what_needs_a_group_before_the_first_step_has_one(self):
    self.job.restore(self.model)
    x, y = np.ones([5, 3], np.float32), np.ones([5, 1], np.float32)
    self.assertFalse(self.job.strategy.extended.communicator.is_member)
    loss = self.model.evaluate(x, y, batch_size=2, verbose=0)
    self.assertTrue(self.job.strategy.extended.communicator.is_member)
    self.assertAllClose(loss, np.mean((self.model.predict(x) - y) ** 2))

  def test_fit_after_a_death_is_one_for_callbacks(self):
    self.job.restore(self.model)
    self.job.update(0, 1)
    path = os.path.join(self.create_tempdir().full_path, 'run.json')
    monitor = tfs.MonitorCallback(path)
    heard = _Heard()
    self.job.fit(
      self.model,
      _make_batches,
      epochs=3,
      steps_per_epoch=_STEPS,
      callbacks=[monitor, heard],
      verbose=0,
    )
    self.assertEqual(heard.events, ['begin', 0, 1, 2, 'end'])
    with open(path.replace('.json', '-0.json'), encoding='utf-8') as file:
      trace = json.load(file)
    spans = [(e.get('cat'), e['name']) for e in trace['traceEvents']]
    for category in ('step', 'input'):
      self.assertLen([s for s in spans if s[0] == category], 3 * _STEPS - 1)
    self.assertEqual(self.job.position, Position(3))

  @tiers.parameters(
    tiers.smoke('dataset', 1),
    ('distributed', 1),
    ('generator', 1),
    ('dataset', 2),
  )
  def test_fit_goes_on(self, kind, group):
    """Checks that `fit` does the remaining steps, and restarts a partial group."""
    self.model.steps_per_execution = group
    self.job.restore(self.model)
    self.job.update(1, 3)

    def make_batches(epoch, step):
      batches = _make_batches(epoch, step)
      if kind == 'distributed':
        return self.job.strategy.experimental_distribute_dataset(batches)
      return batches if kind == 'dataset' else (b for b in batches)

    history = self.job.fit(self.model, make_batches, 3, _STEPS, verbose=0)
    self.assertEqual(history.epoch, [1, 2])
    steps = int(self.model.optimizer.iterations.numpy())
    self.assertEqual(steps, group + _STEPS)
    self.assertEqual(self.job.position, Position(3))

  def test_backups_are_refused(self):
    backup = keras.callbacks.BackupAndRestore('backup')
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'BackupAndRestore'
    ):
      self.job.fit(self.model, _make_batches, 3, _STEPS, [backup])

  @parameterized.named_parameters(
    ('stopped_in_its_first_part', (0, 1), ['begin', 0, 'end']),
    ('nothing_is_left', (3, 0), []),
  )
  def test_fit_that_is_short(self, position, events):
    self.job.restore(self.model)
    self.job.update(*position)
    heard = _Heard(stops=True)
    self.job.fit(self.model, _make_batches, 3, _STEPS, [heard], verbose=0)
    self.assertEqual(heard.events, events)

  def test_history_is_whole_if_training_is_called_again(self):
    """A worker may come when the others have trained, or between two epochs."""
    calls = []

    def interrupt(epoch, logs=None):
      if epoch == 1 and len(calls) == 1:
        raise elastic_members.CallAgain('A worker joined.')

    def train(job):
      calls.append(job)
      with job.strategy.scope():
        model = common.linear(3, 1)
        model.compile('sgd', 'mse')
      job.restore(model)
      callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)]
      history = job.fit(
        model, _make_batches, 3, _STEPS, callbacks, verbose=0
      ).history
      if len(calls) == 2:
        raise elastic_members.CallAgain('A worker joined.')
      return history['loss']

    losses = tfs.elastic.run(train, devices=['CPU:0'])
    self.assertLen(calls, 3)
    self.assertLen(losses, 3)
    self.assertGreater(losses[0], losses[1])
    self.assertGreater(losses[1], losses[2])


class InterruptedStepTest(tf.test.TestCase, parameterized.TestCase):
  """A step that fails at any of its collectives is done again, and once."""

  @tiers.parameters(
    tiers.soak('rich'), tiers.smoke('two_optimizers'), ('embedding',)
  )
  def test_done_once(self, kind):
    numbers = itertools.count()
    failures, models = [], []

    def failing(collective):
      def call(group, *args, name='', **kwargs):
        # Each fault is one collective further in its step than the one before.
        if not name.startswith('elastic/') and next(numbers) % 9 == 8:
          failures.append(name)
          raise errors.WorkerUnavailableError(f'a fault at {name}')
        return collective(group, *args, name=name, **kwargs)

      return call

    def train(job):
      with job.strategy.scope():
        model = elastic_program.compiled(kind)
      models.append(model)
      job.restore(model)
      job.fit(
        model,
        lambda epoch, step: elastic_program.make_batches(epoch, step, 36, 2),
        2,
        18,
        verbose=0,
        **elastic_program.fit_options(kind),
      )
      return len(job.generations)

    group_class = tfs.process_group.ProcessGroup
    for name in ('all_reduce', 'all_gather', 'broadcast'):
      patched = failing(getattr(group_class, name))
      self.enter_context(mock.patch.object(group_class, name, patched))
    groups = tfs.elastic.run(train, devices=['CPU:0'])
    (model,) = models  # It was built only once.
    self.assertEqual(groups, 1 + len(failures))
    self.assertGreater(groups, 10)
    want, _ = elastic_program.uninterrupted(2, kind, 36)
    for a, b in zip(want, model.get_weights(), strict=True):
      self.assertLess(np.abs(a - b).max(), 1e-6)


class MajorityTest(parameterized.TestCase):
  """Who is wrong, by what workers say and when they came."""

  def check(self, rank, answers, came):
    options = tfs.ElasticOptions()
    members = elastic_members.Members(options, mock.Mock(), 9)
    members._state, members._all_came = mock.Mock(), came
    group = members._communicator.group
    group.rank, group.members = rank, [f'task {r}' for r in range(len(answers))]
    members.check_same(answers, 'batch 3', 'look')

  @parameterized.parameters(
    ('aab', [1, 1, 1], [2]),
    # The first decide, however many come later.
    ('abb', [1, 3, 3], [1, 2]),
    ('abab', [1, 1, 2, 1], [0, 2]),
    # Nobody is right.
    ('ab', [1, 1], [0, 1]),
    ('abb', [1, 1, 2], [0, 1, 2]),
    ('abc', [], [0, 1, 2]),
    ('aaa', [1, 2, 3], []),
  )
  def test_who_differs_leaves(self, answers, came, wrong):
    for rank in range(len(answers)):
      if rank in wrong:
        with self.assertRaisesRegex(
          errors.CollectiveMismatchError, 'batch 3 .* Fix: look'
        ):
          self.check(rank, answers, came)
      elif wrong:
        with self.assertRaisesRegex(
          elastic_members.MembershipChange, f'task {wrong[0]} differs in batch'
        ):
          self.check(rank, answers, came)
      else:
        self.check(rank, answers, came)


class BeginTest(tf.test.TestCase):
  """One of two workers, which finds nobody."""

  def run_alone(self, restarts='0', **options):
    cluster = tfs.cluster.ClusterConfig(
      {'worker': processes.addresses(2)}, 'worker', 1
    )
    options = tfs.ElasticOptions(window_seconds=0.2, **options)
    group = tfs.process_group.GroupOptions(rendezvous_timeout_seconds=1.5)
    with mock.patch.dict(os.environ, {'TFS_RESTART_COUNT': restarts}):
      return tfs.elastic.run(
        lambda job: (job.position.epoch, job.strategy.num_workers),
        options,
        cluster,
        ring=tfs.RingOptions(group=group),
        devices=['CPU:0'],
      )

  def test_one_of_two_is_no_majority(self):
    with self.assertRaisesRegex(errors.RendezvousError, 'Missing: task 0'):
      self.run_alone()

  def test_restarted_worker_does_not_begin_alone(self):
    with self.assertRaisesRegex(errors.RendezvousError, 'was started again'):
      self.run_alone('2', min_workers=1)

  def test_new_worker_begins_if_it_may_and_if_it_is_not_too_late(self):
    options = {'min_workers': 1, 'directory': self.create_tempdir().full_path}
    self.assertEqual(self.run_alone(**options), (0, 1))
    with self.assertRaisesRegex(errors.JobFinishedError, 'been completed'):
      self.run_alone(**options)


if __name__ == '__main__':
  tf.test.main()

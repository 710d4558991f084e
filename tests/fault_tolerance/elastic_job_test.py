"""A job of one worker counts its steps and calls `fit`."""

import itertools
import json
import os
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tf_case, tiers, virtual_devices
from tests.fault_tolerance import elastic_program
from tests.programs import common
from tf_strategies import errors
from tf_strategies.checkpoint.position import Position
from tf_strategies.cluster import launcher_note
from tf_strategies.fault_tolerance import elastic_job, elastic_members
from tf_strategies.strategies.multi_worker import elastic

virtual_devices.configure()

_STEPS = 4


def _make_batches(epoch, step, epochs=3):
  rows = np.ones([2 * (epochs * _STEPS - epoch * _STEPS - step), 3], np.float32)
  return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(2)


class _EventRecorder(keras.callbacks.Callback):
  """Records the calls of a callback."""

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


class JobTest(tf_case.TestCase):
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

  def test_interrupted_step_of_a_loop_counts_once(self):
    self.job.restore(self.model)
    for step in range(5):
      self._apply()
      self.job.update(0, step + 1)
    self._apply()  # A worker dies before this step is reported.
    self.job._state.hold()
    self.assertEqual(self.job.position, Position(0, 6))

  def test_worker_far_behind_takes_over_state_and_position(self):
    """Checks that the function is called again with the new state and position."""
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

  def test_equal_steps_of_two_groups_give_two_states(self):
    """Checks that a worker takes one of the two when the network is whole again."""
    self.job.restore(self.model)
    self.job.update(0, 3)
    state = self.job._state
    for other, is_taken in ((state.group, False), ([1, 'other'], True)):
      tasks = [mock.Mock(rank=i, progress=state.order) for i in range(2)]
      group = mock.Mock(rank=1, members=tasks)
      group.exchange = lambda tag, value, other=other: [
        {**value, 'group': other} if tag == 'elastic/state' else value,
        value,
      ]
      group.broadcast.side_effect = lambda array, root, name: array
      self.job._synchronise(group, 'train')
      self.assertEqual(group.broadcast.called, is_taken)

  def test_lost_state_is_reported(self):
    with (
      mock.patch.dict(os.environ, {'TFS_RESTART_COUNT': '1'}),
      self.assertLogs(level='WARNING') as logs,
    ):
      self.job.restore(self.model)
      self.assertEqual(self.job.position, Position())
    self.assertIn('begins again', ''.join(logs.output))

  def test_loop_without_restore_is_refused(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'call job.restore'
    ):
      self.job.update(0, 1)

  def test_evaluate_before_the_first_step_forms_a_group(self):
    self.job.restore(self.model)
    x, y = np.ones([5, 3], np.float32), np.ones([5, 1], np.float32)
    self.assertFalse(self.job.strategy.extended.communicator.is_member)
    loss = self.model.evaluate(x, y, batch_size=2, verbose=0)
    self.assertTrue(self.job.strategy.extended.communicator.is_member)
    self.assertAllClose(loss, np.mean((self.model.predict(x) - y) ** 2))

  def test_callbacks_see_one_fit_after_a_restart(self):
    self.job.restore(self.model)
    self.job.update(0, 1)
    path = self.path('run.json')
    monitor = tfs.MonitorCallback(path)
    recorder = _EventRecorder()
    self.job.fit(
      self.model,
      _make_batches,
      epochs=3,
      steps_per_epoch=_STEPS,
      callbacks=[monitor, recorder],
      verbose=0,
    )
    self.assertEqual(recorder.events, ['begin', 0, 1, 2, 'end'])
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
  def test_fit_does_the_remaining_steps(self, kind, group):
    """Checks that `fit` repeats a partial group of `steps_per_execution`."""
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

  def test_backup_and_restore_is_refused(self):
    backup = keras.callbacks.BackupAndRestore('backup')
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'BackupAndRestore'
    ):
      self.job.fit(self.model, _make_batches, 3, _STEPS, [backup])

  @parameterized.named_parameters(
    ('stopped_in_first_epoch', (0, 1), ['begin', 0, 'end']),
    ('no_steps_left', (3, 0), []),
  )
  def test_short_fit_calls_callbacks(self, position, events):
    self.job.restore(self.model)
    self.job.update(*position)
    recorder = _EventRecorder(stops=True)
    self.job.fit(self.model, _make_batches, 3, _STEPS, [recorder], verbose=0)
    self.assertEqual(recorder.events, events)

  def test_history_is_complete_if_training_restarts(self):
    """Simulates workers that join between two epochs and after training."""
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


class InterruptedStepTest(tf_case.TestCase):
  """A step that fails at any of its collectives is repeated and applied once."""

  @tiers.parameters(
    tiers.soak('rich'), tiers.smoke('two_optimizers'), ('embedding',)
  )
  def test_interrupted_step_is_applied_once(self, kind):
    numbers = itertools.count()
    failures, models = [], []

    def failing(collective):
      def call(group, *args, name='', **kwargs):
        # Each fault hits the next collective of a step.
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
    (model,) = models  # The model was built only once.
    self.assertEqual(groups, 1 + len(failures))
    self.assertGreater(groups, 10)
    want, _ = elastic_program.uninterrupted(2, kind, 36)
    for a, b in zip(want, model.get_weights(), strict=True):
      self.assertLess(np.abs(a - b).max(), 1e-6)


class MajorityTest(parameterized.TestCase):
  """The workers that differ are found by majority and by time of joining."""

  def check(self, rank, values, came):
    members = elastic_members.Members(tfs.ElasticOptions(), mock.Mock(), 9)
    members._state, members._all_came = mock.Mock(), came
    group = members._communicator.group
    group.rank, group.members = rank, [f'task {r}' for r in range(len(values))]
    members.check_same(values, 'batch 3', 'look')

  @parameterized.parameters(
    ('aab', [1, 1, 1], [2]),
    # The workers of the first group decide, even if more workers join later.
    ('abb', [1, 3, 3], [1, 2]),
    ('abab', [1, 1, 2, 1], [0, 2]),
    # No value has a majority.
    ('ab', [1, 1], [0, 1]),
    ('abb', [1, 1, 2], [0, 1, 2]),
    ('abc', [], [0, 1, 2]),
    ('aaa', [1, 2, 3], []),
  )
  def test_differing_workers_leave(self, values, came, wrong):
    for rank in range(len(values)):
      if rank in wrong:
        with self.assertRaisesRegex(
          errors.CollectiveMismatchError, 'batch 3 .* Fix: look'
        ):
          self.check(rank, values, came)
      elif wrong:
        with self.assertRaisesRegex(
          elastic_members.MembershipChange, f'task {wrong[0]} differs in batch'
        ):
          self.check(rank, values, came)
      else:
        self.check(rank, values, came)


class LoneWorkerTest(tf.test.TestCase):
  """One of two workers, which finds no peer."""

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

  def test_one_of_two_workers_does_not_start(self):
    with self.assertRaisesRegex(errors.RendezvousError, 'Missing: task 0'):
      self.run_alone()

  def test_restarted_worker_does_not_start_alone(self):
    with self.assertRaisesRegex(errors.RendezvousError, 'was started again'):
      self.run_alone('2', min_workers=1)

  def test_new_worker_starts_alone_only_until_the_job_is_finished(self):
    options = {'min_workers': 1, 'directory': self.create_tempdir().full_path}
    self.assertEqual(self.run_alone(**options), (0, 1))
    with self.assertRaisesRegex(errors.JobFinishedError, 'been completed'):
      self.run_alone(**options)

  def test_worker_does_not_start_after_another_has_trained(self):
    with launcher_note.Note() as note:
      note.pass_on(launcher_note.TRAINED, 'worker 0')
      own = {launcher_note.VARIABLE: note.variable('worker 1')}
      with (
        mock.patch.dict(os.environ, own),
        self.assertRaisesRegex(errors.JobFinishedError, 'the launcher'),
      ):
        self.run_alone(min_workers=1)


if __name__ == '__main__':
  tf.test.main()

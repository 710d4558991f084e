"""Predictions as formulas, buckets as a strategy makes them, and the command."""

import json
import os
import pathlib

import hypothesis
import keras
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

import tf_strategies as tfs
from benchmarks import processes
from tf_strategies import errors, planning
from tf_strategies.collectives import Link, Topology
from tf_strategies.planning import planner
from tf_strategies.strategies.mirrored import packing

_LINK = Link(1e-3, 1e-7)
_MIB = 1 << 20


class BucketsTest(absltest.TestCase):
  @hypothesis.settings(deadline=None, max_examples=30)
  @hypothesis.given(
    st.lists(
      st.sampled_from([1, 7, 5000, 262_143, 262_144, 600_000]), min_size=1
    ),
    st.sampled_from([_MIB, 2 * _MIB, 8 * _MIB]),
  )
  def test_as_a_strategy_packs_them(self, lengths, most):
    packed = packing.pack([tf.zeros([n]) for n in lengths], most)
    self.assertEqual(
      planner.buckets_of([4 * n for n in lengths], most),
      [4 * bucket.shape[0] for bucket in packed.buckets],
    )


class PlanTest(parameterized.TestCase):
  def test_formula_of_the_ring(self):
    plan = planning.plan([8_000_000], Topology(4, _LINK), compressions=['none'])
    [ring] = [way for way in plan.ways if way.algorithm == 'ring']
    bound = 6 * _LINK.seconds(2_000_000)
    # Pieces hide the latency of all but the first.
    self.assertBetween(ring.seconds, bound - 6 * 1e-3, bound * 1.001)
    self.assertEqual(ring.wire_bytes, 12_000_000)
    self.assertEqual(ring.num_buckets, 1)

  def test_fastest_first_and_codecs_last_where_links_are_fast(self):
    slow = planning.plan([4 * _MIB] * 3, Topology(3, Link(1e-4, 1e-6)))
    fast = planning.plan([4 * _MIB] * 3, Topology(3, Link(1e-5, 1e-11)))
    for plan in (slow, fast):
      seconds = [way.seconds for way in plan.ways]
      self.assertEqual(seconds, sorted(seconds))
      self.assertFalse(plan.is_measured)
      self.assertIn('simulated', str(plan))
    self.assertEqual(slow.ways[0].compression, 'int8')
    self.assertEqual(fast.ways[0].compression, 'none')
    self.assertEqual(slow.best().compression, 'none')
    self.assertEqual(slow.best(None), slow.ways[0])

  def test_smaller_buckets_where_they_cost_nothing(self):
    sizes = [400_000] * 40
    for latency, expected in ((0.0, _MIB), (1.0, 64 * _MIB)):
      plan = planning.plan(sizes, Topology(4, Link(latency, 1e-8)))
      self.assertEqual(plan.best().bucket_bytes, expected)

  def test_two_levels(self):
    topology = Topology(8, Link(1e-5, 1e-10), Link(1e-4, 1e-8), 4)
    best = planning.plan([25_000_000], topology).best()
    self.assertEqual(best.algorithm, 'hierarchical(4)')
    options = tfs.RingOptions(**best.options())
    self.assertEqual(options.all_reduce, 'hierarchical(4)')

  def test_model(self):
    model = keras.Sequential([keras.Input([10]), keras.layers.Dense(5)])
    model.layers[-1].trainable = True
    plan = tfs.plan(model, Topology(2, _LINK))
    self.assertEqual(plan.parameter_bytes, 4 * (50 + 5))

  @parameterized.parameters(16, 129, 1000)
  def test_beyond_what_was_measured(self, world_size):
    few = Topology(4, Link(1e-5, 1e-10), Link(1e-4, 1e-8), 2)
    many = planning.extrapolate(few, world_size)
    self.assertEqual(many.world_size, world_size)
    self.assertEqual(many.group_size, None if world_size % 2 else 2)
    self.assertEqual(many.link(0, world_size - 1), few.inter)
    plan = planning.plan([_MIB], many, compressions=['none'])
    self.assertFalse(plan.is_measured)
    self.assertGreater(plan.best().seconds, 0)

  @parameterized.named_parameters(
    ('model', 'model', Topology(2, _LINK), {}),
    ('size', [-1], Topology(2, _LINK), {}),
    ('nothing', [], Topology(2, _LINK), {}),
    ('cluster', [1], 'cluster', {}),
    ('codec', [1], Topology(2, _LINK), {'compressions': ['zip']}),
    ('no_codec', [1], Topology(2, _LINK), {'compressions': []}),
    ('bucket', [1], Topology(2, _LINK), {'bucket_bytes': [0]}),
  )
  def test_bad_arguments(self, model, cluster, options):
    with self.assertRaises(errors.UnsupportedOptionError):
      planning.plan(model, cluster, **options)

  def test_compressions_may_be_an_iterator(self):
    names = ['none', 'int8']
    found = [
      planning.plan([400_000] * 40, Topology(2, _LINK), compressions=given)
      for given in (names, iter(names))
    ]
    ways = [
      {(way.compression, way.bucket_bytes) for way in plan.ways}
      for plan in found
    ]
    self.assertEqual(ways[0], ways[1])

  def test_more_workers_than_there_are_schedules_for(self):
    few = Topology(2, _LINK)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'world_size'):
      planning.extrapolate(few, 100_000)
    most = planning.extrapolate(few, 4096)
    plan = planning.plan([_MIB], most, compressions=['none'])
    self.assertEqual(plan.topology.world_size, 4096)

  def test_no_way_with_that_codec(self):
    plan = planning.plan([1], Topology(2, _LINK), compressions=['none'])
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'none'):
      plan.best('int8')


class CommandTest(absltest.TestCase):
  def test_without_a_job(self):
    done = processes.run_python(
      *('-m', 'tf_strategies.planning', '--variables_bytes=8000000'),
      *('--world_sizes=4,256', '--latency_us=1000', '--bandwidth_mb_per_s=10'),
      deadline_seconds=60,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('4 workers, 8.0 MB of gradients, assumed', done.stdout)
    self.assertIn('256 workers', done.stdout)
    self.assertIn("Take tfs.RingOptions(all_reduce='", done.stdout)

  @pytest.mark.multi_process
  def test_job_measures_and_the_first_task_prints(self):
    path = pathlib.Path(self.create_tempdir().full_path, 'plan.json')
    done = processes.run_python(
      *('-m', 'tf_strategies.launch', '--num_workers=3', '--'),
      *(os.sys.executable, '-m', 'tf_strategies.planning'),
      *('--variables_bytes=800000,400', '--world_sizes=16'),
      f'--report_json={path}',
      deadline_seconds=90,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(done.stdout.count('measured links'), 1)
    measured, simulated = json.loads(path.read_text())
    self.assertTrue(measured['is_measured'])
    self.assertEqual(measured['world_size'], 3)
    self.assertFalse(simulated['is_measured'])
    self.assertEqual(simulated['world_size'], 16)
    self.assertGreater(min(w['seconds'] for w in measured['ways']), 0)

  def test_wrong_flags(self):
    for flags in ((), ('--model=a.keras', '--variables_bytes=1')):
      done = processes.run_python(
        '-m', 'tf_strategies.planning', *flags, deadline_seconds=60
      )
      self.assertNotEqual(done.returncode, 0)
      self.assertIn('one of --model and --variables', done.stdout + done.stderr)

  def test_wrong_values(self):
    sizes = '--variables_bytes=100'
    for flags, told in (
      (('--variables_bytes=1e6',), '--variables_bytes'),
      ((sizes, '--world_sizes=many'), '--world_sizes'),
      ((sizes, '--bandwidth_mb_per_s=0'), 'bandwidth_mb_per_s'),
      ((sizes, '--report_json=/not/there.json'), '/not/there.json'),
    ):
      done = processes.run_python(
        '-m', 'tf_strategies.planning', *flags, deadline_seconds=60
      )
      self.assertNotEqual(done.returncode, 0)
      self.assertIn(told, done.stdout + done.stderr)
      self.assertNotIn('Traceback', done.stderr)


if __name__ == '__main__':
  absltest.main()

"""Invalid and random values of the environment variables that schedulers set."""

import json

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tests.cluster import schedulers
from tf_strategies import errors
from tf_strategies.cluster import sources

# Case name, environment, changes, and text that the error message must contain.
_BAD = (
  ('slurm_count', schedulers.SLURM, {'SLURM_NTASKS': 'x'}, ('SLURM_NTASKS: ', "'x'")),
  (
    'slurm_list',
    schedulers.SLURM, {'SLURM_JOB_NODELIST': 'node[1-'},
    ('SLURM_JOB_NODELIST: ', "'node[1-'", 'node[001-003,7],gpu1'),
  ),
  (
    'slurm_sum',
    schedulers.SLURM, {'SLURM_TASKS_PER_NODE': '2(x4)'},
    ('SLURM_TASKS_PER_NODE: ', '[2, 2, 2, 2]', '7 tasks'),
  ),
  (
    'slurm_uneven',
    schedulers.SLURM, {'SLURM_TASKS_PER_NODE': None},
    ('SLURM_TASKS_PER_NODE: ', 'missing', 'srun'),
  ),
  (
    'slurm_cyclic',
    schedulers.SLURM, {'SLURM_DISTRIBUTION': 'cyclic'},
    ("'cyclic'", '--distribution=block'),
  ),
  ('port_0', schedulers.SLURM, {'TFS_PORT': '0'}, ('TFS_PORT: ', "'0'", '65535')),
  ('jobset_name', schedulers.JOBSET, {'JOBSET_NAME': None}, ('JOBSET_NAME: ',)),
  (
    'jobset_job',
    schedulers.JOBSET, {'REPLICATED_JOB_NAME': 'workers'},
    ('REPLICATED_JOB_NAME: ', "'workers'", 'chief, worker, ps'),
  ),
  (
    'nobody_trains',
    schedulers.INDEXED_JOB,
    {'TFS_NUM_WORKERS': '0', 'TFS_EVALUATOR': '1'},
    ('does not train',),
  ),
  ('indexed_name', schedulers.INDEXED_JOB, {'TFS_JOB_NAME': None}, ('TFS_JOB_NAME: ', 'missing')),
  (
    'nobody_says_who',
    {},
    {'TFS_NUM_WORKERS': '4'},
    ('TFS_NUM_WORKERS: ', 'is 4', 'tf_strategies.launch'),
  ),
  (
    'service_links',
    schedulers.INDEXED_JOB,
    {'TFS_PORT': 'tcp://10.0.0.7:80'},
    ("'tcp://10.0.0.7:80'", '1 to 65535', 'set TFS_PORT=2222'),
  ),
)  # fmt: skip


class BadValuesTest(parameterized.TestCase):
  @parameterized.named_parameters(*_BAD)
  def test_invalid_value_raises_a_cluster_config_error(
    self, environ, changes, words
  ):
    with self.assertRaises(errors.ClusterConfigError) as caught:
      schedulers.read(environ, **changes)
    message = str(caught.exception)
    for word in (': ', 'Expected ', 'Fix: ', *words):
      self.assertIn(word, message)
    self.assertLess(max(map(len, message.splitlines())), 800)


_VALID = (
  schedulers.SLURM,
  schedulers.JOBSET,
  schedulers.INDEXED_JOB,
)
_NAMES = sorted({*sources.VARIABLES, *(name for e in _VALID for name in e)})
_WORD = st.sampled_from(
  [
    '0',
    '1',
    '2',
    '3',
    '-1',
    '99999',
    '65536',
    'x',
    'a',
    'worker',
    'chief',
    'ps',
    'a-0',
    'n[1-2],a',
    'n[1-',
    '2(x2),1',
  ]
)
_ANY = st.text('aA0 ,-[]{}():"\n\u0661\xe9')
_JSON = st.recursive(
  st.none() | st.integers() | _ANY | _WORD,
  lambda inner: st.lists(inner) | st.dictionaries(_ANY | _WORD, inner),
  max_leaves=6,
).map(json.dumps)
_CHANGES = st.dictionaries(
  st.sampled_from(_NAMES), st.none() | _WORD | _JSON | _ANY, max_size=4
)


class FuzzTest(absltest.TestCase):
  def test_unchanged_environments_are_valid(self):
    for environ in _VALID:
      self.assertIsNotNone(schedulers.read(environ))

  @hypothesis.given(st.sampled_from(_VALID), _CHANGES)
  def test_random_text_gives_a_config_or_a_typed_error(self, valid, changes):
    try:
      config = schedulers.read(valid, **changes)
    except errors.ClusterConfigError as e:
      self.assertIn('Fix: ', str(e))
      return
    if config is not None:
      again = schedulers.read({'TF_CONFIG': config.to_tf_config()})
      self.assertEqual(again, config)


if __name__ == '__main__':
  absltest.main()

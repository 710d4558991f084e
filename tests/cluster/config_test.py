import copy
import json
import pickle

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies import cluster, errors

_TASK = {'type': 'worker', 'index': 0}
_WORKERS = {'worker': ['a:1', 'b:2', 'c:3']}


def _config(workers=None, task=None, **jobs):
  """The text of a TF_CONFIG that is right but for what is passed."""
  described = {**(_WORKERS if workers is None else {'worker': workers}), **jobs}
  return json.dumps({'cluster': described, 'task': task or _TASK})


def _task(**changes):
  return _config(task={**_TASK, **changes})


# Name, text, and words of the message: where, and the value as it is shown.
_BAD = (
  ('empty', '', ("''", 'JSON object')),
  ('blank', '  ', ("'  '",)),
  ('not_json', '{cluster: 1}', ('JSONDecodeError', "'{cluster: 1}'")),
  ('cut_off', '{"cluster": {"worker": ["a:1"', ('JSONDecodeError',)),
  ('single_quotes', "{'cluster': {}}", ('JSONDecodeError',)),
  ('deep', '[' * 100_000, ('RecursionError',)),
  ('many_digits', '{"task": ' + '1' * 5000 + '}', ('ValueError', '...')),
  ('key_twice', '{"cluster": {}, "cluster": {}}', ("'cluster'", 'twice')),
  ('null', 'null', ('None', 'a JSON object')),
  ('number', '3', ('value is 3', 'a JSON object')),
  ('string', '"cluster"', ("'cluster'", 'a JSON object')),
  ('list', '[{"cluster": {}}]', ("[{'cluster': {}}]", 'a JSON object')),
  ('misspelt', '{"Clusters": {"worker": []}}', ("'Clusters'", "'cluster'")),
  ('tasks', '{"tasks": 1}', ("'tasks'", "write 'task'")),
  ('clutser', '{"clutser": {}}', ("'clutser'", "write 'cluster'")),
  (
    'clutser_beside_task',
    '{"clutser": {}, "task": {}}',
    ("'clutser'", "write 'cluster'"),
  ),
  ('tsak', '{"cluster": {}, "tsak": {}}', ("'tsak'", "write 'task'")),
  ('no_cluster', '{"task": {"type": "worker", "index": 0}}', ('missing',)),
  ('null_cluster', '{"cluster": null}', ('cluster is None',)),
  ('list_cluster', '{"cluster": ["a:1"]}', ("cluster is ['a:1']",)),
  ('no_task', '{"cluster": {"worker": ["a:1"]}}', ('task is missing',)),
  ('null_task', '{"cluster": {}, "task": null}', ('task is None',)),
  ('list_task', '{"cluster": {}, "task": [1]}', ('task is [1]',)),
  ('no_type', _config(task={'index': 0}), ('task.type is missing',)),
  ('no_index', _config(task={'type': 'ps'}), ('task.index is missing',)),
  (
    'index_misspelt',
    _config(task={'type': 'ps', 'indx': 0}),
    ("'indx'", "write 'index'"),
  ),
  (
    'type_misspelt',
    _config(task={'Type': 'ps', 'index': 0}),
    ("'Type'", "write 'type'"),
  ),
  ('type_null', _task(type=None), ('task.type is None', 'evaluator')),
  ('type_list', _task(type=['worker']), ("task.type is ['worker']",)),
  ('type_upper', _task(type='Worker'), ("'Worker'", "write 'worker'")),
  ('type_unknown', _task(type='gpu'), ("'gpu'", 'chief, master, worker')),
  ('type_absent', _task(type='ps'), ("task.type is 'ps'", 'cluster (worker)')),
  ('chief_absent', _task(type='chief'), ("task.type is 'chief'",)),
  ('master_absent', _task(type='master'), ("task.type is 'chief'",)),
  ('index_negative', _task(index=-1), ('task.index is -1', 'from 0')),
  ('index_past', _task(index=3), ('task.index is 3', '0 to 2')),
  ('index_huge', _task(index=10**30), ('task.index is 1000',)),
  ('index_true', _task(index=True), ('task.index is True',)),
  ('index_false', _task(index=False), ('task.index is False',)),
  ('index_float', _task(index=1.0), ('task.index is 1.0',)),
  ('index_null', _task(index=None), ('task.index is None',)),
  ('index_words', _task(index='one'), ("task.index is 'one'",)),
  ('index_minus', _task(index='-1'), ("task.index is '-1'",)),
  ('index_spaces', _task(index=' 1'), ("task.index is ' 1'",)),
  ('index_foreign', _task(index='\u0661'), ("task.index is '\\u0661'",)),
  ('index_text_past', _task(index='3'), ('task.index is 3', '0 to 2')),
  ('empty_cluster', _config().replace(json.dumps(_WORKERS), '{}'), ('{}',)),
  ('empty_job', _config(ps=[]), ('cluster.ps is []', 'leave ps out')),
  ('empty_workers', _config([]), ('cluster.worker is []',)),
  ('null_job', _config(ps=None), ('cluster.ps is None',)),
  ('text_job', _config(ps='d:4'), ("cluster.ps is 'd:4'", 'brackets')),
  ('number_job', _config(ps=4), ('cluster.ps is 4',)),
  ('job_unknown', _config(gpu=['d:4']), ("'gpu'", 'chief, master, worker')),
  ('job_empty_name', _config(**{'': ['d:4']}), ("cluster is ''",)),
  ('chief_and_master', _config(chief=['d:4'], master=['e:5']), ('two names',)),
  ('two_chiefs', _config(chief=['d:4', 'e:5']), ("0: 'd:4', 1: 'e:5'",)),
  ('two_masters', _config(master=['d:4', 'e:5']), ('one chief',)),
  ('chief_1', _config(chief={'1': 'd:4'}), ('cluster.chief', 'index 0')),
  ('twice', _config(['a:1', 'b:2', 'a:1']), ("'a:1'", '.worker[0] has it')),
  ('twice_across', _config(ps=['c:3']), ("'c:3'", '.worker[2] has it')),
  ('twice_in_case', _config(['a:1', 'A:1']), ("worker[1] is 'A:1'",)),
  ('twice_in_zeros', _config(['a:1', 'a:01']), ("worker[1] is 'a:01'",)),
  ('twice_ip6', _config(['[::1]:1', '[0::1]:1']), ("'[0::1]:1'",)),
  ('no_port', _config(['host']), ("'host'", 'with a port')),
  ('empty_port', _config(['host:']), ("'host:'", '1 to 65535')),
  ('port_0', _config(['host:0']), ("'host:0'",)),
  ('port_large', _config(['host:65536']), ("'host:65536'",)),
  ('port_name', _config(['host:http']), ("'host:http'",)),
  ('port_negative', _config(['host:-1']), ("'host:-1'",)),
  ('scheme', _config(['grpc://host:1']), ("'grpc://host:1'", 'scheme')),
  ('path', _config(['host:1/a']), ("'host:1/a'",)),
  ('space_before', _config([' host:1']), ("' host:1'", 'spaces')),
  ('space_after', _config(['host:1 ']), ("'host:1 '",)),
  ('line_end', _config(['host:1\n']), ("'host:1\\n'",)),
  ('no_host', _config([':1']), ("':1'", 'host name')),
  ('dash', _config(['-host:1']), ("'-host:1'",)),
  ('ip6_bare', _config(['::1:1']), ("'::1:1'", 'brackets')),
  ('ip6_bad', _config(['[1::2::3]:1']), ("'[1::2::3]:1'",)),
  ('address_null', _config([None]), ('worker[0] is None',)),
  ('address_number', _config(['a:1', 2222]), ('worker[1] is 2222',)),
  ('address_list', _config([['a:1']]), ("worker[0] is ['a:1']",)),
  ('sparse_key', _config({'one': 'a:1'}), ("is 'one'",)),
  ('sparse_twice', _config({'1': 'a:1', '01': 'b:2'}), ("'01'", 'once')),
  ('sparse_absent', _config({'1': 'a:1', '4': 'b:2'}), ('is 0', '1, 4')),
  ('sparse_empty', _config({}), ('cluster is {}',)),
  ('job_misspelt', _config(pss=['d:4']), ("is 'pss'", "write 'ps'")),
  (
    'several_mistakes',
    _config(['a', 'b:2', 'b:2', 'c:0'], gpu=['d:4'], ps=[':5']),
    (
      "\nTF_CONFIG: cluster.worker[0] is 'a'",
      "'b:2'. Expected an address that no other",
      "'c:0'",
      "'gpu'",
      "':5'",
    ),
  ),
  (
    'many_mistakes',
    _config(['a'] * 20),
    ('cluster.worker[4]', '\nAnd 15 more mistakes.'),
  ),
  (
    'environment',
    _config().replace('"cluster"', '"environment": [1], "cluster"', 1),
    ('environment is [1]',),
  ),
)


def _read(text):
  return cluster.ClusterConfig.from_env({'TF_CONFIG': text})


class BadValuesTest(parameterized.TestCase):
  @parameterized.named_parameters(*_BAD)
  def test_is_a_cluster_config_error(self, text, words):
    with self.assertRaises(errors.ClusterConfigError) as caught:
      _read(text)
    message = str(caught.exception)
    for word in ('TF_CONFIG: ', 'Expected ', 'Fix: ', *words):
      self.assertIn(word, message)
    self.assertLess(max(map(len, message.splitlines())), 700)
    self.assertLess(message.count('\n'), 6)

  def test_table_is_long_and_each_text_is_another(self):
    self.assertGreaterEqual(len({text for _, text, _ in _BAD}), 60)

  @parameterized.named_parameters(
    ('jobs', ({}, 'worker', 0)),
    ('no_mapping', (['a:1'], 'worker', 0)),
    ('empty_job', ({'worker': {0: 'a:1'}, 'ps': {}}, 'worker', 0)),
    ('type', ({'worker': {0: 'a:1'}}, 'gpu', 0)),
    ('index', ({'worker': {0: 'a:1'}}, 'worker', 1)),
    ('address', ({'worker': {0: 'a'}}, 'worker', 0)),
    ('environment', ({'worker': {0: 'a:1'}}, 'worker', 0, 3)),
  )
  def test_constructor_checks_too(self, arguments):
    with self.assertRaises(errors.ClusterConfigError):
      cluster.ClusterConfig(*arguments)


class GoodValuesTest(parameterized.TestCase):
  @parameterized.parameters('{}', '{"environment": "cloud"}', '{"job": {}}')
  def test_neither_cluster_nor_task_is_a_single_process(self, text):
    self.assertIsNone(_read(text))

  @parameterized.parameters('worker', 'chief', 'master')
  def test_cluster_of_one_task_is_a_single_process(self, task_type):
    task = {'type': task_type, 'index': 0}
    described = {'cluster': {task_type: ['a:1']}, 'task': task}
    self.assertIsNone(_read(json.dumps(described)))
    # That is known of a cluster only, to which no task can be added.
    described['cluster'][task_type] = {'0': 'a:1'}
    self.assertIsNotNone(_read(json.dumps(described)))

  @parameterized.parameters(
    ({'worker': ['a:1']}, 'evaluator'),
    ({'worker': ['a:1'], 'evaluator': ['b:1']}, 'worker'),
    ({'ps': ['a:1']}, 'ps'),
  )
  def test_another_part_is_not_lost(self, jobs, task_type):
    task = {'type': task_type, 'index': 0}
    config = _read(json.dumps({'cluster': jobs, 'task': task}))
    self.assertEqual(config.task_type, task_type)

  def test_no_variable_is_a_single_process(self):
    self.assertIsNone(cluster.ClusterConfig.from_env({'PATH': 'x'}))

  def test_every_part_is_read(self):
    config = _read(
      json.dumps(
        {
          'cluster': {
            'ps': ['p0:1', 'p1:1'],
            'worker': ['w0:1', 'w1:1', 'w2:1'],
            'chief': ['c:1'],
            'evaluator': ['e:1'],
          },
          'task': {'type': 'worker', 'index': '1', 'trial': '7'},
          'environment': 'cloud',
          'job': {'scale': 'big'},
        }
      )
    )
    self.assertEqual(
      config.jobs,
      {
        'chief': {0: 'c:1'},
        'worker': {0: 'w0:1', 1: 'w1:1', 2: 'w2:1'},
        'ps': {0: 'p0:1', 1: 'p1:1'},
        'evaluator': {0: 'e:1'},
      },
    )
    self.assertEqual(list(config.jobs), ['chief', 'worker', 'ps', 'evaluator'])
    self.assertEqual((config.task_type, config.task_index), ('worker', 1))
    self.assertEqual(config.environment, 'cloud')
    self.assertEqual(config.address, 'w1:1')
    self.assertEqual(
      config.training_tasks,
      (
        ('chief', 0, 'c:1'),
        ('worker', 0, 'w0:1'),
        ('worker', 1, 'w1:1'),
        ('worker', 2, 'w2:1'),
      ),
    )
    self.assertEqual(config.training_index, 2)
    self.assertFalse(config.is_sparse)

  @parameterized.named_parameters(
    # jobs, task, is_chief, training_index, address
    ('worker_0', {}, ('worker', 0), True, 0, 'a:1'),
    ('worker_2', {}, ('worker', 2), False, 2, 'c:3'),
    ('chief', {'chief': ['d:4']}, ('chief', 0), True, 0, 'd:4'),
    ('beside_chief', {'chief': ['d:4']}, ('worker', 0), False, 1, 'a:1'),
    ('master', {'master': ['d:4']}, ('master', 0), True, 0, 'd:4'),
    ('called_chief', {'master': ['d:4']}, ('chief', 0), True, 0, 'd:4'),
    ('beside_master', {'master': ['d:4']}, ('worker', 1), False, 2, 'b:2'),
    ('ps', {'ps': ['p:1', 'q:1']}, ('ps', 1), False, None, 'q:1'),
    ('evaluator_in', {'evaluator': ['e:1']}, ('evaluator', 0), False, None, 'e:1'),
    ('evaluator_out', {}, ('evaluator', 0), False, None, None),
  )  # fmt: skip
  def test_place_of_a_task(self, jobs, task, is_chief, index, address):
    config = _read(_config(task={'type': task[0], 'index': task[1]}, **jobs))
    self.assertEqual(config.is_chief, is_chief)
    self.assertEqual(config.training_index, index)
    self.assertEqual(config.address, address)

  @parameterized.parameters(
    'host:1', 'a.b-c.svc:65535', '10.0.0.1:2222', '[::1]:2222',
    '[fe80::1%eth0]:22', 'under_score:1', 'root.:1', 'X:02222',
  )  # fmt: skip
  def test_address_is_kept_as_it_is(self, address):
    found = _read(_config([address, 'other:3'])).address
    self.assertEqual(found, address)

  def test_sparse_workers(self):
    text = _config({'7': 'h:7', '1': 'h:1'}, {'type': 'worker', 'index': 7})
    config = _read(text)
    self.assertEqual(config.jobs, {'worker': {1: 'h:1', 7: 'h:7'}})
    self.assertEqual(list(config.jobs['worker']), [1, 7])
    self.assertTrue(config.is_sparse)
    self.assertEqual(config.training_index, 1)
    self.assertFalse(config.is_chief)

  @parameterized.parameters('cluster', 'sparseCluster')
  def test_sparse_cluster_may_say_nothing_of_other_jobs(self, key):
    for nothing in (None, [], {}):
      described = {'worker': {'0': 'h:1'}, 'ps': nothing}
      config = _read(json.dumps({key: described, 'task': _TASK}))
      self.assertEqual(config.jobs, {'worker': {0: 'h:1'}})
      self.assertTrue(config.is_sparse)
    described = {'worker': {}, 'ps': ['p:1']}
    task = {'type': 'ps', 'index': 0}
    config = _read(json.dumps({key: described, 'task': task}))
    self.assertEqual(config.jobs, {'ps': {0: 'p:1'}})


class ObjectTest(absltest.TestCase):
  def test_round_trip(self):
    texts = (
      _config(),
      _task(index=2),
      _config(chief=['d:4'], ps=['p:1'], evaluator=['e:1']),
      _config({'0': 'a:1'}),
      _config({'3': 'a:1', '0': 'b:1'}, ps=['p:1', 'q:1']),
      _config(task={'type': 'evaluator', 'index': 0}),
      json.dumps({'environment': 'cloud', 'cluster': _WORKERS, 'task': _TASK}),
    )
    configs = [_read(text) for text in texts]
    self.assertLen(set(configs), len(texts))
    for config in configs:
      again = _read(config.to_tf_config())
      self.assertEqual(again, config)
      self.assertEqual(hash(again), hash(config))
      self.assertEqual(again.to_tf_config(), config.to_tf_config())
      self.assertEqual(pickle.loads(pickle.dumps(config)), config)
      self.assertEqual(copy.deepcopy(config), config)

  def test_lists_stay_lists_for_those_who_read_no_others(self):
    written = json.loads(_read(_config(chief=['d:4'])).to_tf_config())
    self.assertEqual(written['cluster'], {'chief': ['d:4'], **_WORKERS})
    self.assertEqual(written['task'], _TASK)

  def test_it_cannot_be_changed(self):
    config = _read(_config())
    with self.assertRaises(AttributeError):
      config.task_index = 1
    with self.assertRaises(TypeError):
      config.jobs['ps'] = {0: 'p:1'}
    with self.assertRaises(TypeError):
      config.jobs['worker'][3] = 'd:4'

  def test_what_it_was_made_of_may_change(self):
    jobs = {'worker': {0: 'a:1'}}
    config = cluster.ClusterConfig(jobs, 'worker', 0)
    jobs['worker'][1] = 'b:2'
    self.assertEqual(config.jobs, {'worker': {0: 'a:1'}})


_ADDRESS = st.sampled_from(
  ['a:1', 'b:2', '[::1]:3', 'a', 'a:0', 'http://a:1', '', 'a:1 ', 'A:1']
)
_LEAF = (
  st.none() | st.booleans() | st.integers() | st.floats() | st.text() | _ADDRESS
)
_TYPE = st.sampled_from(
  ['chief', 'master', 'worker', 'ps', 'evaluator', 'gpu', '']
)
_INDEX = st.sampled_from([0, 1, 2, -1, '0', '1', True, None, 1.0, 'x'])
_ANYTHING = st.recursive(
  _LEAF,
  lambda inner: st.lists(inner) | st.dictionaries(st.text() | _TYPE, inner),
  max_leaves=8,
)
_TASKS = (
  st.lists(_ADDRESS, max_size=3)
  | st.dictionaries(st.sampled_from('012x'), _ADDRESS, max_size=3)
  | _ANYTHING
)
_LIKELY = st.fixed_dictionaries(
  {},
  optional={
    'cluster': st.dictionaries(_TYPE, _TASKS, max_size=3) | _ANYTHING,
    'sparseCluster': st.dictionaries(_TYPE, _TASKS, max_size=3),
    'task': st.fixed_dictionaries(
      {}, optional={'type': _TYPE | _ANYTHING, 'index': _INDEX | _ANYTHING}
    )
    | _ANYTHING,
    'environment': _ANYTHING,
  },
)
_TEXT = st.text() | (_LIKELY | _ANYTHING).map(json.dumps)


@st.composite
def _almost(draw):
  """A TF_CONFIG of distinct addresses, and whether it was left right."""
  sizes = {job: draw(st.integers(0, 3)) for job in ('ps', 'evaluator')}
  sizes = {'worker': draw(st.integers(2, 4)), **sizes}
  jobs = {
    job: [f'{job}-{index}:{2222 + index}' for index in range(size)]
    for job, size in sizes.items()
    if size
  }
  addresses = draw(st.sampled_from(list(jobs.values())))
  change = draw(
    st.sampled_from(['', 'a', 'a:0', 'http://a:1', 'WORKER-1:2223'])
  )
  if change and addresses is not jobs['worker']:
    addresses[-1] = change
  elif change:
    addresses[0] = change
  return {'cluster': jobs}, not change


class FuzzTest(absltest.TestCase):
  @pytest.mark.soak
  @hypothesis.settings(max_examples=1000)
  @hypothesis.given(_TEXT, st.integers(0, 200))
  def test_any_text_is_a_config_or_one_error(self, text, cut):
    for candidate in (text, text[:cut]):
      try:
        config = _read(candidate)
      except errors.ClusterConfigError as e:
        self.assertIn('Fix: ', str(e))
        continue
      if config is not None:
        self.assertEqual(_read(config.to_tf_config()), config)

  @hypothesis.given(_almost(), st.integers(0, 1))
  def test_one_change_of_a_right_one(self, changed, worker):
    config, is_right = changed
    config['task'] = {'type': 'worker', 'index': worker}
    text = json.dumps(config)
    if is_right:
      self.assertEqual(json.loads(_read(text).to_tf_config()), config)
    else:
      with self.assertRaises(errors.ClusterConfigError):
        _read(text)


if __name__ == '__main__':
  absltest.main()

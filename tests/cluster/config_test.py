import json
import pickle

from absl.testing import absltest, parameterized

from tf_strategies import cluster, errors

_TASK = {'type': 'worker', 'index': 0}
_WORKERS = {'worker': ['a:1', 'b:2', 'c:3']}


def _config(workers=None, task=None, **jobs):
  """Returns a TF_CONFIG that is valid except for the arguments."""
  described = {**(_WORKERS if workers is None else {'worker': workers}), **jobs}
  return json.dumps({'cluster': described, 'task': task or _TASK})


def _task(**changes):
  return _config(task={**_TASK, **changes})


# A TF_CONFIG, and text that the error message must contain.
_BAD = (
  ('', "''", 'JSON object'),
  ('{"cluster": {"worker": ["a:1"', 'JSONDecodeError'),
  ('{"cluster": {}, "cluster": {}}', "'cluster'", 'twice'),
  ('[{"cluster": {}}]', "[{'cluster': {}}]", 'a JSON object'),
  ('{"clutser": {}, "task": {}}', "'clutser'", "write 'cluster'"),
  ('{"task": {"type": "worker", "index": 0}}', 'cluster is missing'),
  ('{"cluster": {"worker": ["a:1"]}}', 'task is missing'),
  (_config(task={'index': 0}), 'task.type is missing'),
  (_task(type='Worker'), "'Worker'", "write 'worker'"),
  (_task(type='ps'), "task.type is 'ps'", 'cluster (worker)'),
  (_task(index=3), 'task.index is 3', '0 to 2'),
  (_task(index=True), 'task.index is True'),
  (_config(ps=[]), 'cluster.ps is []', 'leave ps out'),
  (_config(master=['d:4']), "is 'master'", 'chief, worker'),
  (_config(chief=['d:4', 'e:5']), "('d:4', 'e:5')"),
  (_config(ps=['c:3']), "'c:3'", '.worker[2] has it'),
  (_config(['[::1]:1', '[0::1]:1']), "'[0::1]:1'"),
  (_config(['host']), "'host'", 'with a port'),
  (_config(['host:65536']), "'host:65536'"),
  (_config(['grpc://host:1']), "'grpc://host:1'", 'scheme'),
  (_config(['::1:1']), "'::1:1'", 'brackets'),
  (_config(['a:1', 2222]), 'worker[1] is 2222'),
  (_config({'0': 'a:1', '1': 'b:2'}), "{'0': 'a:1', '1': 'b:2'}", 'brackets'),
)


def _read(text):
  return cluster.ClusterConfig.from_env({'TF_CONFIG': text})


class BadValuesTest(parameterized.TestCase):
  @parameterized.parameters(*_BAD)
  def test_invalid_config_raises_a_cluster_config_error(self, text, *words):
    with self.assertRaises(errors.ClusterConfigError) as caught:
      _read(text)
    message = str(caught.exception)
    for word in ('TF_CONFIG: ', 'Expected ', 'Fix: ', *words):
      self.assertIn(word, message)
    self.assertLess(len(message), 700)


class GoodValuesTest(parameterized.TestCase):
  @parameterized.parameters('{}', '{"environment": "cloud"}', _config(['a:1']))
  def test_empty_config_or_one_task_is_a_single_process(self, text):
    self.assertIsNone(_read(text))

  @parameterized.parameters(
    ({'worker': ['a:1']}, 'evaluator'), ({'ps': ['a:1']}, 'ps')
  )
  def test_one_task_of_another_type_keeps_its_type(self, jobs, task_type):
    task = {'type': task_type, 'index': 0}
    config = _read(json.dumps({'cluster': jobs, 'task': task}))
    self.assertEqual(config.task_type, task_type)

  def test_all_fields_are_read(self):
    jobs = {
      'ps': ('p0:1', 'p1:1'),
      'worker': ('w0:1', 'w1:1'),
      'chief': ('c:1',),
      'evaluator': ('e:1',),
    }
    config = _read(
      json.dumps(
        {
          'cluster': jobs,
          'task': {'type': 'worker', 'index': '1', 'trial': '7'},
          'environment': 'cloud',
          'job': {'scale': 'big'},
        }
      )
    )
    self.assertEqual(config.jobs, jobs)
    self.assertEqual(list(config.jobs), ['chief', 'worker', 'ps', 'evaluator'])
    self.assertEqual((config.task_type, config.task_index), ('worker', 1))
    self.assertEqual(config.address, 'w1:1')
    self.assertEqual(
      config.training_tasks,
      (('chief', 0, 'c:1'), ('worker', 0, 'w0:1'), ('worker', 1, 'w1:1')),
    )

  @parameterized.parameters(
    # jobs, task, is_chief, training_index, address
    ({}, ('worker', 0), True, 0, 'a:1'),
    ({'chief': ['d:4']}, ('chief', 0), True, 0, 'd:4'),
    ({'chief': ['d:4']}, ('worker', 0), False, 1, 'a:1'),
    ({'evaluator': ['e:1']}, ('evaluator', 0), False, None, 'e:1'),
    ({}, ('evaluator', 0), False, None, None),
  )
  def test_properties_of_a_task(self, jobs, task, is_chief, index, address):
    config = _read(_config(task={'type': task[0], 'index': task[1]}, **jobs))
    self.assertEqual(config.is_chief, is_chief)
    self.assertEqual(config.training_index, index)
    self.assertEqual(config.address, address)

  @parameterized.parameters(
    '10.0.0.1:2222', '[fe80::1%eth0]:22', 'under_score:1', 'X:02222'
  )
  def test_address_is_unchanged(self, address):
    self.assertEqual(_read(_config([address, 'other:3'])).address, address)


class ObjectTest(absltest.TestCase):
  def test_round_trip(self):
    text = _config(chief=['d:4'], ps=['p:1'], evaluator=['e:1'])
    config = _read(text)
    written = config.to_tf_config()
    self.assertEqual(json.loads(written), json.loads(text))
    for again in (_read(written), pickle.loads(pickle.dumps(config))):
      self.assertEqual(again, config)
      self.assertLen({again, config, _read(_config())}, 2)


if __name__ == '__main__':
  absltest.main()

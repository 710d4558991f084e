from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.launch import tasks

_COUNTS = {'chief': 1, 'worker': 12, 'ps': 2, 'evaluator': 0}


class RankFilterTest(parameterized.TestCase):
  @parameterized.parameters(
    ('chief', ['chief 0']),
    ('ps', ['ps 0', 'ps 1']),
    ('worker:3', ['worker 3']),
    ('worker:9-11', ['worker 10', 'worker 11', 'worker 9']),
    ('worker:0-0', ['worker 0']),
    ('chief,worker:0-1', ['chief 0', 'worker 0', 'worker 1']),
    ('chief, ps:1', ['chief 0', 'ps 1']),
    ('ps:0,ps:0,ps', ['ps 0', 'ps 1']),
  )
  def test_names_tasks(self, text, expected):
    self.assertEqual(sorted(tasks.parse_filter(text, _COUNTS)), expected)

  @parameterized.parameters(
    '', ',', 'chief,', 'gpu', 'Worker', 'worker:', 'worker:x', 'worker:-1',
    'worker:12', 'worker:0-12', 'worker:2-1', 'worker:0-', 'worker:0:1',
    'worker:0,2', 'evaluator', 'evaluator:0', '0', 'worker 0', 'ps:\u0661',
    'worker:9999999999',
  )  # fmt: skip
  def test_anything_else_is_refused(self, text):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      tasks.parse_filter(text, _COUNTS)
    message = str(caught.exception)
    self.assertIn(f'--rank_filter={text} is', message)
    self.assertIn('(chief, worker:0-11, ps:0-1)', message)


if __name__ == '__main__':
  absltest.main()

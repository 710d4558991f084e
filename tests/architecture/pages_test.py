"""The site's additions to docs/: links, API names, drawn schedules."""

import dataclasses
import re

import pytest
from absl.testing import absltest, parameterized

from tests import docstrings
from tests.architecture import project
from tf_strategies import errors
from tf_strategies.collectives import algorithms
from tools.pages import draw_schedule, hooks

pytestmark = pytest.mark.smoke


class PagesTest(parameterized.TestCase):
  @parameterized.parameters('draw_schedule', 'hooks')
  def test_examples_run(self, name):
    docstrings.assert_examples(self, f'tools.pages.{name}')

  @parameterized.parameters(
    ('index.md', '[a](docs/x.md)', '[a](x.md)'),
    ('index.md', '![a](benchmarks/b.png)', '![a](images/b.png)'),
    ('clusters.md', '[a](../docs/gpus.md#x)', '[a](gpus.md#x)'),
    ('gpus.md', '[a](../ARCHITECTURE.md#b)', '[a](architecture.md#b)'),
    ('gpus.md', '[`a`](https://b.org)', '[`a`](https://b.org)'),
    ('gpus.md', '[a](#here) [b](../tools/lint.sh)', '[a](#here) b'),
    ('gpus.md', '```\n[a](../README.md)\n```', '```\n[a](../README.md)\n```'),
  )
  def test_links(self, uri, text, expected):
    self.assertEqual(hooks.links_of_site(text, uri, None), expected)

  def test_every_page_is_in_the_navigation(self):
    files = project.text_files()
    named = set(re.findall(r': ([\w/]+\.md)$', files['mkdocs.yml'], re.M))
    made = {f'api/{room}.md' for room in hooks._ROOMS} | set(
      hooks._PAGES.values()
    )
    written = {path[5:] for path in files if re.fullmatch(r'docs/.*\.md', path)}
    self.assertEqual(named, made | written)

  def test_every_public_name_is_in_the_reference(self):
    listed = {
      name.rpartition('.')[2]
      for room in hooks._ROOMS
      for name in hooks.public_names(room)
    }
    public = {name for _, name in hooks._imports('_public')}
    self.assertContainsSubset(public, listed)
    self.assertContainsSubset({'errors', 'run_task', 'make_dataset'}, listed)

  @parameterized.parameters(('ring', 4), ('tree', 5), ('halving_doubling', 4))
  def test_drawing_has_an_arrow_for_each_message(self, name, ranks):
    schedule = algorithms.build(name, ranks)
    messages = {(t.round, t.src, t.dst, t.reduce) for t in schedule.transfers}
    drawn = draw_schedule.draw(schedule)
    self.assertEqual(drawn.count('class="head"'), len(messages))
    added = sum(reduce for *_, reduce in messages)
    self.assertEqual(drawn.count('class="add"'), added)
    for rank in range(ranks):
      self.assertIn(f'>rank {rank}<', drawn)

  def test_schedule_that_is_none_is_not_drawn(self):
    ring = algorithms.build('ring', 3)
    self.assertIn('4 rounds; 1.33 times', draw_schedule.figure(ring))
    broken = dataclasses.replace(ring, transfers=ring.transfers[1:])
    with self.assertRaises(errors.ScheduleError):
      draw_schedule.figure(broken)


if __name__ == '__main__':
  absltest.main()

"""Events from any thread reach every listener. Without listeners, none are made."""

import threading

import pytest
from absl.testing import absltest

from tf_strategies.monitoring import recorder


class RecorderTest(absltest.TestCase):
  def test_nobody_listens(self):
    events = []
    recorder.add('before', 'a', 1, 2)
    with recorder.listening(events):
      recorder.add('meanwhile', 'a', 1, 2)
    with recorder.span('after', 'a'):
      pass
    self.assertEqual([e.name for e in events], ['meanwhile'])
    self.assertFalse(recorder.is_on())

  @pytest.mark.smoke
  def test_all_sinks_get_all_events_of_all_threads(self):
    first, second = [], []

    def work(i):
      for j in range(500):
        with recorder.span(f'{i}', 'a', number=j):
          pass

    threads = [
      threading.Thread(target=work, args=(i,), name=f'{i}') for i in range(4)
    ]
    with recorder.listening(first), recorder.listening(second):
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join(60)
    for events in (first, second):
      self.assertLen(events, 2000)
      for i in range(4):
        mine = [e for e in events if e.name == f'{i}']
        self.assertEqual([e.args['number'] for e in mine], list(range(500)))


if __name__ == '__main__':
  absltest.main()

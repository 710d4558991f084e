"""Functions that do something else have other names, in any process."""

import functools

import tensorflow as tf

from tf_strategies.data import fingerprint

_SPEC = tf.TensorSpec([None], tf.string)


def _make(factor, later=False):
  def function(records):
    return factor * tf.strings.length(records) if not later else missing

  if later is None:
    missing = 0
  return function


class OfFunctionTest(tf.test.TestCase):
  def test_tells_closures_defaults_and_arguments_apart(self):
    def scaled(records, factor=2):
      return records * factor

    names = [
      fingerprint.of_function(function)
      for function in (
        _make(1),
        _make(2),
        _make(2, later=True),
        scaled,
        functools.partial(scaled, factor=3),
        functools.partial(scaled, factor=4),
        tf.strings.length,
        len,
        None,
      )
    ]
    self.assertLen(set(names), len(names))
    self.assertEqual(names[0], fingerprint.of_function(_make(1)))
    self.assertEqual(
      fingerprint.of_function(tf.function(scaled)),
      fingerprint.of_function(scaled),
    )

  def test_objects_among_arguments_have_no_name_of_their_own(self):
    def name(*args, **kwargs):
      return fingerprint.of_function(functools.partial(len, *args, **kwargs))

    one, other = object(), object()
    self.assertEqual(name(one, x=one), name(other, x=other))
    self.assertNotEqual(name(one, x=1), name(one, x=2))
    self.assertNotEqual(name(1, one), name(2, one))
    self.assertNotEqual(name(one), name(one, one))
    self.assertNotEqual(name(x=one), name(y=one))
    self.assertEqual(name([1, {'a': one}]), name([1, {'a': other}]))
    self.assertNotEqual(name([1, {'a': 2}]), name([1, {'a': 3}]))


class OfGraphTest(tf.test.TestCase):
  def test_sees_what_a_function_calls_and_captures(self):
    def calls(helper):
      return lambda records: helper(records)

    one = fingerprint.of_graph(calls(lambda r: tf.strings.length(r)), _SPEC)
    same = fingerprint.of_graph(calls(lambda r: tf.strings.length(r)), _SPEC)
    other = fingerprint.of_graph(
      calls(lambda r: tf.strings.length(r) + 1), _SPEC
    )
    self.assertEqual(one, same)
    self.assertNotEqual(one, other)
    captured = [
      fingerprint.of_graph(lambda r, c=c: tf.strings.length(r) + c, _SPEC)
      for c in (tf.constant(1), tf.constant(2))
    ]
    self.assertNotEqual(*captured)

  def test_python_and_tables_have_the_name_of_their_function(self):
    def python(records):
      return tf.numpy_function(len, [records], tf.int64)

    table = tf.lookup.StaticHashTable(
      tf.lookup.KeyValueTensorInitializer([b'a'], [1]), 0
    )

    def lookup(records):
      return table.lookup(records)

    self.assertEqual(
      fingerprint.of_graph(python, _SPEC), fingerprint.of_function(python)
    )
    self.assertEqual(
      fingerprint.of_graph(lookup, _SPEC), fingerprint.of_graph(lookup, _SPEC)
    )


if __name__ == '__main__':
  tf.test.main()

"""Every public signature rejects misspelled arguments."""

import inspect
import pkgutil

import pytest
from absl.testing import absltest

import tf_strategies as tfs
from tf_strategies import errors
from tools.pages import hooks

# Public callables that accept any keyword, and the reason.
_OPEN = {
  'create_strategy': 'passed to the strategy, which checks them',
  'DynamicEmbedding': 'passed to keras.layers.Layer',
  'GroupOptions.from_env': 'passed to GroupOptions, which checks them',
  'ParameterServerStrategy.track': 'names that the caller gives to objects',
  'ParameterServerStrategy.restore': 'names that the caller gives to objects',
}


def _public_objects():
  """Yields the documented objects with their last name."""
  for subpackage in hooks._ROOMS:
    for path in hooks.public_names(subpackage):
      value = pkgutil.resolve_name(path)
      name = path.rpartition('.')[2]
      named = vars(value) if inspect.ismodule(value) else {name: value}
      yield from ((n, v) for n, v in named.items() if not n.startswith('_'))


def _callables(name, value):
  """Yields a function, or a class's constructor and those of its methods
  that Keras does not define.
  """
  is_ours = getattr(value, '__module__', '').startswith('tf_strategies')
  if not (is_ours and callable(value)):
    return
  yield name, value
  if not inspect.isclass(value):
    return
  for base in value.__mro__:
    if not base.__module__.startswith('tf_strategies'):
      continue
    for method in vars(base):
      of_keras = any(
        method in vars(other)
        for other in value.__mro__
        if other.__module__.startswith('keras.')
      )
      if not method.startswith('_') and not of_keras:
        yield f'{name}.{method}', getattr(value, method)


def _takes_any_keyword(function) -> bool:
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):  # A property, a constant, or a class from C.
    return False
  return any(
    p.kind == p.VAR_KEYWORD and 'Unpack' not in str(p.annotation)
    for p in parameters
  )


def _open_names(objects) -> set[str]:
  return {
    name
    for each in objects
    for name, function in _callables(*each)
    if _takes_any_keyword(function)
  }


# The search must find these strategies, options, callbacks and sources.
_SOME_WITH_OPTIONS = {
  'MultiWorkerRingStrategy',
  'RingOptions',
  'Run',
  'TFRecords',
}
# The package constructs these; users only receive them.
_MADE_FOR_USERS = ('Member', 'ProcessGroup')


def _has_options(cls) -> bool:
  """Returns whether users construct the class with named options."""
  if not inspect.isclass(cls) or cls.__name__ in (*_OPEN, *_MADE_FOR_USERS):
    return False
  is_ours = getattr(cls.__init__, '__module__', '').startswith('tf_strategies')
  if not is_ours or issubclass(cls, BaseException) or inspect.isabstract(cls):
    return False
  return any(
    p.default is not p.empty for p in inspect.signature(cls).parameters.values()
  )


class SignaturesTest(absltest.TestCase):
  @pytest.mark.smoke
  def test_only_listed_callables_accept_any_keyword(self):
    objects = list(_public_objects())
    names = {name for name, _ in objects}
    self.assertContainsSubset(
      {'run', 'Job', 'MonitorCallback', 'TFRecords', 'Error'}, names
    )
    self.assertEqual(_open_names(objects), set(_OPEN))

  def test_misspelled_option_suggests_the_correct_one(self):
    seen = set()
    for _, cls in _public_objects():
      if not _has_options(cls):
        continue
      seen.add(cls.__name__)
      for name in list(inspect.signature(cls).parameters):
        with (
          self.subTest(f'{cls.__name__} {name}'),
          self.assertRaisesRegex(
            errors.UnsupportedOptionError,
            f"option '{name}x' of {cls.__name__}. Fix: write '{name}'",
          ),
        ):
          cls(**{f'{name}x': None})
    self.assertContainsSubset(_SOME_WITH_OPTIONS, seen)

  def test_wrapper_and_create_strategy_suggest_the_correct_option(self):
    for call, name in (
      (lambda: tfs.keras.LocalSteps('sgd', 2, outr=None), 'outer'),
      (lambda: tfs.create_strategy('parameter_server', clustr=1), 'cluster'),
    ):
      with self.assertRaisesRegex(
        errors.UnsupportedOptionError, f"Fix: write '{name}'"
      ):
        call()
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'clipnorm on the inner optimizer'
    ):
      tfs.keras.LazyRows('sgd', clipnorm=1.0)


if __name__ == '__main__':
  absltest.main()

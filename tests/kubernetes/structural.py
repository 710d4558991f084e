"""Checks an object against a CustomResourceDefinition, strictly.

An API server drops fields that it does not know, unless it is asked not to;
here each is a problem, since a dropped field is a setting that does nothing.
"""

import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES = {
  'object': dict,
  'array': list,
  'string': str,
  'boolean': bool,
  'integer': int,
  'number': (int, float),
}
_KEYWORDS = frozenset(
  {
    'type', 'properties', 'additionalProperties', 'required', 'items', 'enum',
    'pattern', 'minimum', 'maximum', 'minItems', 'maxItems', 'minLength',
    'maxLength', 'anyOf', 'format', 'description', 'default', 'nullable',
    'x-kubernetes-int-or-string', 'x-kubernetes-list-type',
    'x-kubernetes-list-map-keys', 'x-kubernetes-map-type',
    # Rules in CEL, which tests put into words of their own.
    'x-kubernetes-validations',
  }
)  # fmt: skip


def directory() -> pathlib.Path | None:
  """Where the definitions are, if this machine has them."""
  text = os.environ.get('TFS_CRD_DIR')
  return pathlib.Path(text) if text else None


def schema(name: str, version: str) -> dict[str, Any]:
  """The schema of a version in the definition that the file `name` holds."""
  import yaml

  text = (directory() / name).read_text(encoding='utf-8')
  for document in yaml.load_all(
    text, getattr(yaml, 'CSafeLoader', yaml.SafeLoader)
  ):
    if document and document['kind'] == 'CustomResourceDefinition':
      for candidate in document['spec']['versions']:
        if candidate['name'] == version:
          return candidate['schema']['openAPIV3Schema']
  raise ValueError(f'{name} defines no version {version!r}.')


def problems(value: Any, schema: Mapping[str, Any], at: str = '') -> list[str]:
  """What is wrong with an object, a sentence each; empty if nothing is."""
  return list(_problems(value, schema, at))


def _problems(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
  unknown = set(schema) - _KEYWORDS
  if unknown:
    raise ValueError(f'{at}: this checker knows no {sorted(unknown)}.')
  if schema.get('x-kubernetes-int-or-string'):
    if not isinstance(value, int | str) or isinstance(value, bool):
      yield f'{at} is {value!r}, neither an integer nor a string'
    return
  expected = schema.get('type')
  is_bool_for_number = isinstance(value, bool) and expected != 'boolean'
  if expected and (
    not isinstance(value, _TYPES[expected]) or is_bool_for_number
  ):
    yield f'{at} is {value!r}, no {expected}'
    return
  if 'enum' in schema and value not in schema['enum']:
    yield f'{at} is {value!r}, none of {schema["enum"]}'
  if isinstance(value, dict):
    yield from _object_problems(value, schema, at)
  elif isinstance(value, list):
    yield from _array_problems(value, schema, at)
  elif isinstance(value, str):
    if 'pattern' in schema and not re.search(schema['pattern'], value):
      yield f'{at} is {value!r}, which {schema["pattern"]} does not match'
    length = len(value)
    if (
      not schema.get('minLength', 0)
      <= length
      <= schema.get('maxLength', length)
    ):
      yield f'{at} is {value!r}, too short or too long'
  else:
    if (
      not schema.get('minimum', value) <= value <= schema.get('maximum', value)
    ):
      yield f'{at} is {value!r}, out of range'
    if schema.get('format') == 'int32' and not -(2**31) <= value < 2**31:
      yield f'{at} is {value!r}, more than 32 bits'


def _object_problems(
  value: Mapping[str, Any], schema: Mapping[str, Any], at: str
) -> Iterator[str]:
  for name in schema.get('required', ()):
    if name not in value:
      yield f'{at}.{name} is missing'
  properties = schema.get('properties', {})
  # The API server itself defines the metadata of the object as a whole.
  is_metadata = at == '.metadata'
  for name, item in value.items():
    if name in properties:
      yield from _problems(item, properties[name], f'{at}.{name}')
    elif 'additionalProperties' in schema:
      more = schema['additionalProperties']
      yield from _problems(item, more, f'{at}.{name}')
    elif not is_metadata:
      yield f'{at}.{name} is not known'


def _array_problems(
  value: list[Any], schema: Mapping[str, Any], at: str
) -> Iterator[str]:
  size = len(value)
  if not schema.get('minItems', 0) <= size <= schema.get('maxItems', size):
    yield f'{at} has {size} items'
  kind = schema.get('x-kubernetes-list-type')
  keys = value
  if kind == 'map':
    names = schema['x-kubernetes-list-map-keys']
    defaults = schema['items']['properties']
    keys = [
      tuple(item.get(n, defaults[n].get('default')) for n in names)
      for item in value
    ]
  if kind in ('map', 'set') and len(set(keys)) != len(keys):
    yield f'{at} has something twice'
  for place, item in enumerate(value):
    yield from _problems(item, schema['items'], f'{at}[{place}]')

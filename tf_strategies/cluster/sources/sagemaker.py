"""SageMaker: SM_HOSTS and SM_CURRENT_HOST of its training toolkit.

Every host runs the program once. The hosts are listed in the same order
everywhere; which of them are parameter servers, `roles` says.

Example:

  >>> from tf_strategies.cluster.sources import sagemaker
  >>> parts = sagemaker.read({'SM_HOSTS': '["algo-1", "algo-2", "algo-3"]',
  ...                         'SM_CURRENT_HOST': 'algo-3', 'TFS_NUM_PS': '1'})
  >>> parts.jobs['chief'], parts.task_type
  (['algo-1:2222'], 'ps')
"""

from collections.abc import Mapping

from tf_strategies.cluster import checks, tf_config
from tf_strategies.cluster.sources import roles

VARIABLE = 'SM_HOSTS'

_CURRENT = 'SM_CURRENT_HOST'
_ALLOWED = 'a JSON list of the names of hosts'
_FIX = (
  'leave it as SageMaker sets it, such as ["algo-1", "algo-2"], or unset '
  'SM_HOSTS to train in a single process'
)


def read(environ: Mapping[str, str]) -> tf_config.Parts | None:
  """The cluster of SM_HOSTS; None if it lists a single host."""
  if VARIABLE not in environ:
    return None
  hosts = tf_config.parse_json(environ[VARIABLE], _ALLOWED, _FIX)
  if not isinstance(hosts, list) or not hosts:
    raise checks.bad('its value', hosts, _ALLOWED, _FIX)
  port = roles.port(environ)
  addresses = [f'{host}:{port}' for host in hosts]
  for place, host in enumerate(hosts):
    if not isinstance(host, str):
      raise checks.bad(f'host {place}', host, 'the name of a host', _FIX)
    checks.split_address(addresses[place], f'host {place} with its port')
  current = environ.get(_CURRENT, checks.MISSING)
  if current not in hosts:
    raise checks.bad_variable(
      _CURRENT,
      current,
      f'one of the hosts of SM_HOSTS ({checks.show(hosts)})',
      'leave both as SageMaker sets them',
    )
  if len(hosts) == 1:
    return None
  return roles.assign(environ, addresses, hosts.index(current))

"""Small invented reports of benchmarks with a table, of which there is no report."""

_ABOUT = {
  'command': 'python -m benchmarks.it --rounds=2',
  'hardware': {
    'cpu_model': 'A Processor',
    'cpu_count': 3,
    'memory_bytes': 5 * 2**30,
    'gpus': [],
  },
  'versions': {'python': '3.11.4', 'tensorflow': '2.21.0'},
  'load_average': [0.25, 1.0, 1.0],
  'date': '2026-02-03T04:05:06+00:00',
}


def _recovery():
  return [
    {
      'peer': peer,
      'kills': 7,
      **dict(zip(('median_s', 'p90_s', 'p99_s', 'most_s'), times, strict=True)),
      'median_step_ms': 4.0,
      'median_rejoin_s': 6.0,
    }
    for peer, times in [('ours', (0.1, 0.2, 0.3, 0.4))]
  ]


def _parameter_server():
  return [
    {
      'model': 'cnn',
      'num_workers': 2,
      'steps_per_execution': 10,
      'peers': [
        {
          'peer': peer,
          'steps_per_s': {'median': rate, 'least': rate - 1, 'most': rate + 1},
          'ratio_to_stock': rate / 100,
          'iterations': iterations,
          'steps_per_turn': 450,
        }
        for peer, rate, iterations in (
          ('stock', 100.0, 380),
          ('ours', 150.0, 450),
        )
      ],
    }
  ]


def _strategy(name, workers, **changes):
  record = {
    'name': name,
    'strategy': name,
    'num_workers': workers,
    'num_ps': 0,
    'error': None,
    'images_per_s': 7000.0,
    'bytes_per_step_into_busiest': None,
    'bytes_per_step_total': 640e3,
    'variable_bytes_most': 640e3,
    'variable_bytes_total': 1280e3,
    'test_accuracy': 0.98768,
    'runs': [{'images_per_s': 7000.0}],
  }
  return {**record, **changes}


def _report(benchmark, settings=None, **content):
  return {
    'benchmark': benchmark,
    **_ABOUT,
    'settings': settings or {},
    **content,
  }


# Reports by name, as in benchmarks/results.
REPORTS = {
  'recovery': _report('recovery', results=_recovery()),
  'parameter_server': _report('parameter_server', results=_parameter_server()),
  'strategies': _report(
    'strategies',
    {'num_virtual_devices': 4},
    costs=[
      _strategy('ring_mirrored', 0),
      {
        **dict.fromkeys(_strategy('', 0)),
        **{'name': 'one_device', 'strategy': 'one_device', 'num_workers': 0},
        **{'num_ps': 0, 'error': 'It died.', 'runs': []},
      },
    ],
  ),
}

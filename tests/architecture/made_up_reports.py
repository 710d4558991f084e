"""Small invented reports of every benchmark that has a table."""

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


def _spread(median):
  return {
    'median_ms': median,
    'p10_ms': 0.9 * median,
    'p90_ms': 1.5 * median,
    'num_samples': 3,
  }


def _all_reduce():
  kinds = {
    'AutoAllReduce': 'ours',
    'ring': 'ours',
    'ReductionToOneDevice': 'built_in',
    'default': 'built_in',
  }
  return [
    {
      'num_devices': devices,
      'set': name,
      'num_tensors': 25,
      'num_bytes': 25_000_000,
      'peer': peer,
      'kind': kind,
      **_spread(devices * (2.0 + i)),
      'ratio_to_fastest_built_in': (2 + i) / 4,
      'busiest_bytes_in': 30e6,
    }
    for devices, name in ((2, '25x1MB'), (4, 'resnet'))
    for i, (peer, kind) in enumerate(kinds.items())
  ]


def _process_all_reduce():
  names = ('ours_memory', 'ours_in_graph', 'gloo', 'mpich', 'mwms_ring')
  sizes = []
  for size in (65_536, 25_000_000):
    medians = {name: 2.0 + i for i, name in enumerate(names)}
    sizes.append(
      {
        'world_size': 2,
        'num_bytes': size,
        'peers': {name: _spread(median) for name, median in medians.items()},
        'ratios': {
          f'{a}/{b}': medians[a] / medians[b]
          for a in names[:2]
          for b in names[2:]
        },
      }
    )
  return sizes


def _training_step():
  return [
    {
      'peer': peer,
      **_spread(median),
      'ratio_to_collective': median / 50,
      'median_cpu_ms': 2 * median,
      'megabytes_sent': None,
    }
    for peer, median in (
      ('ring_8mb', 30.0),
      ('collective', 50.0),
      ('no_communication', 20.0),
    )
  ]


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


def _pipelines():
  return [
    {'name': name, 'items_per_s': rates[0], 'rates': rates}
    for name, rates in (('naive_arrays', [30e3]), ('make_dataset', [900e3]))
  ]


def _report(benchmark, settings=None, **content):
  return {
    'benchmark': benchmark,
    **_ABOUT,
    'settings': settings or {},
    **content,
  }


# Reports by name, as in benchmarks/results.
REPORTS = {
  'all_reduce': _report('all_reduce', results=_all_reduce()),
  'process_all_reduce': _report(
    'process_all_reduce',
    results=_process_all_reduce(),
    skipped={'ours_mpi': 'There is no mpiexec: install MPICH.'},
    links=[{'versions': {'gloo': {'python': '3.12.1', 'torch': '2.13.0'}}}],
  ),
  'training_step': _report('training_step', results=_training_step()),
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
  'input_pipeline': _report('input_pipeline', rows=_pipelines()),
}

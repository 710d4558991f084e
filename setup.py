"""Packaging of tf_strategies.

TensorFlow is an extra, not a requirement: a hard `tensorflow` dependency
would pull its wheel even where `tensorflow-cpu` is already installed. Choose
one of `[cpu]`, `[tensorflow]` and `[and-cuda]`.
"""

import os
import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).resolve().parent
_TENSORFLOW_RANGE = '>=2.18,<2.22'
_KERAS = 'keras>=3.12'

_EXAMPLES = [
  # The offline default dataset: handwritten digits inside the wheel.
  'scikit-learn',
  # TensorFlow pins its own minor version of it, or (2.21) does not bring it.
  'tensorboard>=2.18',
  # The `tensorboard` command of TensorFlow 2.18 imports pkg_resources.
  'setuptools<81',
]

# Where the checkout can be read; the name of its host is no part of it.
_URL = os.environ.get('TFS_REPOSITORY_URL', '').rstrip('/')

# What `tfs manifests` needs.
_MANIFESTS = ['PyYAML']

# What the notebook of the examples needs.
_NOTEBOOK = ['ipykernel', 'nbclient']

# What benchmarks need to start their jobs, and to weigh them.
_BENCHMARKS = ['psutil']


def _version() -> str:
  """The version, read as text: importing the package would need NumPy."""
  text = (_ROOT / 'tf_strategies' / 'version.py').read_text(encoding='utf-8')
  match = re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE)
  if match is None:
    raise ValueError(
      "tf_strategies/version.py must have a line __version__ = '<version>'."
    )
  return match.group(1)


def _long_description() -> str:
  """The README; its links lead to the repository, or are text without one."""
  text = (_ROOT / 'README.md').read_text(encoding='utf-8')
  target = rf'[\1]({_URL}/blob/main/\2)' if _URL else r'\1'
  return re.sub(r'\[([^]]+)\]\((?!\w+://)([^)]+)\)', target, text)


setuptools.setup(
  name='tf_strategies',
  version=_version(),
  description=(
    'tf.distribute strategies for TensorFlow and Keras 3: ring all-reduce on '
    'any device, elastic multi-worker rings and a parameter server.'
  ),
  long_description=_long_description(),
  long_description_content_type='text/markdown',
  project_urls={'Source': _URL} if _URL else {},
  keywords=[
    *('tensorflow', 'keras', 'distributed-training', 'all-reduce'),
    *('elastic', 'parameter-server', 'horovod'),
  ],
  license='Apache-2.0',
  license_files=['LICENSE'],
  # With '' mapped, `pip install -e .` puts the checkout itself on the path,
  # so that tests and examples can be run as plain scripts.
  package_dir={'': '.'},
  packages=setuptools.find_packages(
    include=['tf_strategies', 'tf_strategies.*']
  ),
  package_data={'tf_strategies': ['py.typed', 'kubernetes/templates.yaml']},
  entry_points={'console_scripts': ['tfs = tf_strategies.__main__:main']},
  # The Pythons that TensorFlow has wheels for; tools/install.sh says it, too.
  python_requires='>=3.10,<3.14',
  install_requires=['absl-py', 'numpy'],
  extras_require={
    'cpu': [f'tensorflow-cpu{_TENSORFLOW_RANGE}', _KERAS],
    'tensorflow': [f'tensorflow{_TENSORFLOW_RANGE}', _KERAS],
    'and-cuda': [f'tensorflow[and-cuda]{_TENSORFLOW_RANGE}', _KERAS],
    'examples': _EXAMPLES,
    'manifests': _MANIFESTS,
    'notebook': _NOTEBOOK,
    'benchmarks': _BENCHMARKS,
    # What `make docs` needs. Pinned: another release warns of other things.
    'docs': ['mkdocs-material==9.8.2', 'mkdocstrings[python]==1.0.8'],
    # Not in dev: a cluster brings an MPI library of its own.
    'mpi': ['mpi4py>=4', 'mpich'],
    'dev': [
      *_EXAMPLES,
      *_MANIFESTS,
      *_NOTEBOOK,
      *_BENCHMARKS,
      'build',
      'hypothesis',
      # A client of strategies; it requires Keras, and no TensorFlow.
      'keras-tuner==1.4.8',
      'mypy',
      'pytest>=9',
      'pytest-xdist',
      # Pinned: another release formats or complains differently.
      'ruff==0.17.5',
      'wheel',
    ],
  },
  classifiers=[
    'Development Status :: 4 - Beta',
    'Intended Audience :: Developers',
    'Intended Audience :: Science/Research',
    'Operating System :: POSIX :: Linux',
    'Programming Language :: Python :: 3',
    'Programming Language :: Python :: 3.10',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Topic :: System :: Distributed Computing',
    'Typing :: Typed',
  ],
)

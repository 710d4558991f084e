"""Checks this machine: TensorFlow, devices, the clock and the disk."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np

from tf_strategies import _requirements, errors
from tf_strategies.checkpoint import checkpointer
from tf_strategies.cluster import command_line
from tf_strategies.doctor import findings
from tf_strategies.doctor.findings import FAIL, NOTE, OK, Finding

# TensorFlow takes long to load from a slow disk.
_PROBE_SECONDS = 180.0


def look(
  checkpoint_dir: str | None = None,
) -> tuple[list[Finding], dict[str, Any]]:
  """Returns the findings, and the versions of TensorFlow and Keras.

  Args:
    checkpoint_dir: directory in which a small checkpoint is written and deleted.
  """
  known, ending = _probe()
  found = [
    Finding(
      OK, 'Python', f'{platform.python_version()}, {os.cpu_count()} CPUs'
    ),
    *_software(known, ending),
    findings.of('clock', _clock),
  ]
  if checkpoint_dir is not None:
    found.append(findings.of('checkpoints', _directory, checkpoint_dir))
  return found, {n: known[n] for n in ('TensorFlow', 'Keras') if n in known}


def _probe() -> tuple[dict[str, Any], str]:
  """Returns the values that the probe printed, or why it failed."""
  environment = command_line.module_environment()
  words = [sys.executable, '-m', 'tf_strategies.doctor.probe']
  try:
    done = subprocess.run(
      words,
      env={**environment, 'TF_CPP_MIN_LOG_LEVEL': '3'},
      stdin=subprocess.DEVNULL,
      capture_output=True,
      timeout=_PROBE_SECONDS,
      check=False,
    )
  except subprocess.TimeoutExpired:
    return {}, f'it took more than {_PROBE_SECONDS:g} s'
  if done.returncode:
    lines = done.stderr.decode('utf-8', 'replace').strip().splitlines()
    why = lines[-1] if lines else f'it ended with status {done.returncode}'
    return {}, why
  # Among whatever else TensorFlow may print.
  *_, found = (x for x in done.stdout.splitlines() if x.startswith(b'{'))
  return json.loads(found), ''


def _software(known: dict[str, Any], ending: str) -> list[Finding]:
  # Another backend is what ends Keras's import where that is not installed.
  backend = os.environ.get('KERAS_BACKEND') or known.get('backend')
  if backend not in (None, 'tensorflow'):
    fix = (
      'unset KERAS_BACKEND, or write "backend": "tensorflow" in '
      '~/.keras/keras.json'
    )
    what = f'its backend is {backend}. Expected tensorflow'
    return [Finding(FAIL, 'Keras', what, fix)]
  if ending:
    error = RuntimeError(f'TensorFlow or Keras cannot be used: {ending}')
    found = findings.failed('TensorFlow', error)
    fix = found.fix or (
      "in the checkout run pip install '.[cpu]', or '.[and-cuda]' for GPUs; tested "
      f'is {_requirements.TESTED}'
    )
    return [Finding(FAIL, 'TensorFlow', found.what, fix)]
  names = ('TensorFlow', 'Keras')
  text = ' with '.join(f'{name} {known[name]}' for name in names)
  untested = [n for n in names if not _requirements.is_tested(n, known[n])]
  if not untested:
    first = Finding(OK, 'TensorFlow', f'{text}: tested')
  else:
    what = (
      f'{text}: has what is needed, but {" and ".join(untested)} was not tested'
    )
    fix = f'install {_requirements.TESTED}'
    first = Finding(NOTE, 'TensorFlow', what, fix)
  return [first, _gpus(known)]


def _gpus(known: dict[str, Any]) -> Finding:
  if known['gpus']:
    return Finding(
      OK, 'GPUs', f'{len(known["gpus"])}: {", ".join(known["gpus"])}'
    )
  present = glob.glob('/dev/nvidia[0-9]*')
  if not present:
    return Finding(OK, 'GPUs', 'none: CPUs compute')
  hidden = os.environ.get('CUDA_VISIBLE_DEVICES')
  if hidden in ('', '-1'):
    what = f'{len(present)}, hidden by CUDA_VISIBLE_DEVICES={hidden}'
    return Finding(NOTE, 'GPUs', what, 'unset it to train on them')
  what = f'{len(present)} are here, and TensorFlow sees none'
  if not known['is_for_gpus']:
    fix = "install its build for GPUs: pip install '.[and-cuda]'"
    return Finding(FAIL, 'GPUs', f'{what}: its build is for CPUs', fix)
  fix = 'see whether nvidia-smi works, and what `import tensorflow` logs'
  return Finding(FAIL, 'GPUs', what, fix)


def _clock() -> str | Finding:
  now, installed = time.time(), os.stat(__file__).st_mtime
  shown = time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))
  if now >= installed - 86400:
    return f'{shown} UTC'
  return Finding(
    FAIL,
    'clock',
    f'{shown} UTC, before this package was written: certificates and timelines '
    'would be wrong',
    'set the clock, and keep it by NTP',
  )


def _directory(directory: str) -> str | Finding:
  # As training writes them: a file, its sync, and a rename.
  trial = os.path.join(directory, f'.tfs-doctor-{os.getpid()}')
  path = pathlib.Path(directory).absolute()
  absent = [p for p in (path, *path.parents) if not os.path.lexists(p)]
  try:
    kept = checkpointer.Checkpointer(trial)
    try:
      kept.save({'doctor': np.arange(4.0)}, {})
      kept.newest()
      free = shutil.disk_usage(directory).free
    finally:
      shutil.rmtree(trial, ignore_errors=True)
      with contextlib.suppress(OSError):
        for made in absent:
          os.rmdir(made)
  except errors.StorageError as e:
    what = str(e).partition(' Fix')[0]
    fix = 'pass a directory that this user can write, with room'
    return Finding(FAIL, 'checkpoints', what.replace(trial, directory), fix)
  return (
    f'written, read and deleted in {directory}; {free / 1e9:,.1f} GB are free'
  )

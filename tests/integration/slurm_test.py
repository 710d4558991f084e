"""docs/slurm.md under a real slurmctld, with two nodes on this machine."""

import contextlib
import getpass
import os
import pathlib
import random
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time

import psutil
from absl.testing import absltest

from benchmarks import processes
from tests.architecture import documents, project
from tf_strategies.launch import ports as ports_lib

_PAGE = 'docs/slurm.md'
_PATH = f'{os.environ.get("PATH", "")}:/usr/sbin:/sbin'
_PROGRAMS = (
  *('munged', 'slurmctld', 'slurmd'),
  *('sbatch', 'scancel', 'scontrol', 'sinfo', 'srun', 'openssl'),
)
_DEADLINE_SECONDS = 120.0
# The names are addresses, so that tasks can reach each other.
_NODES = ('127.0.0.1', '127.0.0.2')
_CONFIGURATION = """
ClusterName=tfs
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdSpoolDir={directory}/%n
# Uses neither cgroups nor services of the host.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
# The ports of the tasks depend on it.
FirstJobId={first}
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]}
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]}
PartitionName=all Nodes=ALL Default=YES
"""


class _Slurm:
  """munged, slurmctld and two slurmd. The context leaves no process."""

  def __init__(self):
    self._stack = contextlib.ExitStack()
    # A short name, because the path of a Unix socket has at most 108 letters.
    self.directory = pathlib.Path(
      self._stack.enter_context(tempfile.TemporaryDirectory())
    )
    self._conf = self.directory / 'slurm.conf'
    python = self.directory / 'python'
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    self.env = processes.python_environment(
      {'PATH': f'{self.directory}:{_PATH}', 'SLURM_CONF': str(self._conf)},
      without=['TFS_SECRET', 'TFS_SECRET_FILE'],
    )
    self._stack.callback(self._end_all)
    try:
      self._start()
    except BaseException:
      self.close()
      raise

  def call(self, *words):
    """Returns the output of a Slurm command."""
    done = processes.run(
      words,
      env=self.env,
      cwd=self.directory,
      is_checked=True,
      deadline_seconds=20,
    )
    return done.stdout.strip()

  def tasks(self, program):
    """Returns the processes of a step that run a program, by task number."""
    found = {}
    for process, environ in self._processes():
      with contextlib.suppress(psutil.Error):
        is_task = 'SLURM_STEP_ID' in environ and process.name() != 'srun'
        if is_task and process.cmdline()[-1:] == [program]:
          found[int(environ['SLURM_PROCID'])] = process
    return found

  def close(self):
    self._stack.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _start(self):
    key = self.directory / 'munge.key'
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    (self.directory / 'state').mkdir()
    self._conf.write_text(
      _CONFIGURATION.format(
        host=socket.gethostname(),
        user=getpass.getuser(),
        directory=self.directory,
        ports=ports_lib.pick_ports(3),
        first=random.randrange(1, 10**6),
        nodes=_NODES,
      )
    )
    files = {'key': 'key', 'pid': 'pid', 'log': 'log', 'seed': 'seed'}
    self._daemon(
      *('munged', '--foreground', '--force'),
      f'--socket={self.directory}/munge.socket',
      *(f'--{n}-file={self.directory}/munge.{e}' for n, e in files.items()),
    ).wait_until((self.directory / 'munge.socket').exists)
    controller = self._daemon('slurmctld', '-D', '-f', str(self._conf))
    for node in _NODES:
      self._daemon('slurmd', '-D', '-N', node, '-f', str(self._conf))
    controller.wait_until(lambda: self._states() == ['idle'] * 2)

  def _states(self):
    done = processes.run(
      ['sinfo', '--noheader', '--Node', '--format=%T'],
      env=self.env,
      deadline_seconds=20,
    )
    return done.stdout.split()

  def _daemon(self, *words):
    program = shutil.which(words[0], path=_PATH)
    return self._stack.enter_context(
      processes.Command(
        [program, *words[1:]], env=self.env, grace_seconds=5, name=words[0]
      )
    )

  def _processes(self):
    """Yields the processes started here, including daemons of steps and tasks."""
    for process in psutil.process_iter():
      with contextlib.suppress(psutil.Error):
        environ = process.environ()
        if environ.get('SLURM_CONF') == str(self._conf):
          yield process, environ

  def _end_all(self):
    ends_at = time.monotonic() + 20
    while left := [process for process, _ in self._processes()]:
      for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
          process.kill()
      psutil.wait_procs(left, 1)
      if time.monotonic() > ends_at:
        raise AssertionError(f'These outlive SIGKILL: {left}')


class SlurmTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    missing = [p for p in _PROGRAMS if not shutil.which(p, path=_PATH)]
    if missing:
      self.skipTest(
        f'no {", ".join(missing)}: apt-get install slurm-wlm munge openssl'
      )

  def test_job_of_the_page_survives_a_killed_task(self):
    text = project.text_files()[_PAGE]
    script = next(b for b in documents.blocks(text, 'bash') if b.title)
    shown = next(documents.blocks(text, 'text')).body
    readme = project.text_files()['README.md']
    program = next(documents.blocks(readme, 'python'))
    with _Slurm() as slurm:
      for block in (script, program):
        path = slurm.directory / block.title
        path.write_text(block.body, encoding='utf-8')
      job = slurm.call('sbatch', '--parsable', script.title)
      log = slurm.directory / f'slurm-{job}.out'
      ends_at = time.monotonic() + _DEADLINE_SECONDS
      victim = None
      while 'COMPLETED' not in (state := slurm.call('scontrol', 'show', 'job')):
        log_text = log.read_text(encoding='utf-8') if log.exists() else ''
        self.assertRegex(state, 'JobState=(PENDING|RUNNING|COMPLET)', log_text)
        self.assertLess(time.monotonic(), ends_at, f'{state}\n{log_text}')
        if victim is None:
          victim = slurm.tasks(program.title).get(1)
          if victim is not None:
            victim.kill()
        time.sleep(0.2)
      log_text = log.read_text(encoding='utf-8')
    self.assertIn('task 1: Killed', log_text)
    losses = [re.findall(r'^(\d\.\d+) 2$', t, re.M) for t in (shown, log_text)]
    self.assertLen(losses[1], 2)
    for loss in (*losses[0], *losses[1]):
      alone = re.search(r'^(\d\.\d+) 1$', readme, re.M)[1]
      self.assertAlmostEqual(float(loss), float(alone), delta=1.1e-4)


if __name__ == '__main__':
  absltest.main()

"""docs/callbacks.md: W&B and MLflow log the same values as on one device."""

import ast
import re
import sqlite3

import numpy as np
from absl.testing import absltest, parameterized

from tests.integration import pages

_PAGE = 'docs/callbacks.md'
_STEPS, _EPOCHS = 4, 2
_SERVERS = ("'multi_worker_ring'", "'parameter_server', mode='sync'")
# Name: (flags of the launcher, changes of the program).
_JOBS = {
  'ring': (['--num_workers=2'], []),
  'servers': (['--num_workers=2', '--num_ps=1', '--chief'], [_SERVERS]),
}
_ALONE = ([], [])
_ORDER = ('batch_size=16', 'batch_size=16, shuffle=False')


class ThirdPartyCallbacksTest(parameterized.TestCase):
  def _wandb(self, launch, changes):
    """Returns the logs that the program passes to W&B in each step."""
    spy = (
      "wandb.init(project='ring')\n",
      "wandb.init(project='ring')\n    log = wandb.log\n"
      "    wandb.log = lambda logs: (print('logged', logs), log(logs))\n",
    )
    program = pages.write(
      self, _PAGE, 'wandb_fit.py', ['wandb'], [_ORDER, spy, *changes]
    )
    output = pages.run(program, launch=launch, env={'WANDB_MODE': 'offline'})
    [run] = program.parent.glob('wandb/offline-run-*/*.wandb')
    self.assertGreater(run.stat().st_size, 1000)
    self.assertTrue((program.parent / 'model.keras').exists())
    logs = map(ast.literal_eval, re.findall(r'logged (\{.*\})', output))
    return [
      {key.removeprefix('batch/'): value for key, value in each.items()}
      for each in logs
      if 'epoch/epoch' not in each
    ]

  def _mlflow(self, launch, changes):
    """Returns the logs of each step from MLflow's tables."""
    program = pages.write(
      self, _PAGE, 'mlflow_fit.py', ['mlflow'], [_ORDER, *changes]
    )
    output = pages.run(program, launch=launch)
    # MLflow turns errors of its callbacks into warnings.
    self.assertNotIn('WARNING mlflow', output)
    logs = [{} for _ in range(_STEPS * _EPOCHS)]
    with sqlite3.connect(program.parent / 'runs.db') as database:
      rows = database.execute('select key, value, step from metrics').fetchall()
      [runs] = database.execute('select count(*) from runs').fetchone()
    self.assertEqual(runs, 1)
    for key, value, step in rows:
      logs[step - 1][key] = value
    return logs

  @parameterized.parameters('_wandb', '_mlflow')
  def test_logs_equal_those_of_one_device(self, tool):
    log = getattr(self, tool)
    losses = [each['loss'] for each in log(*_ALONE)]
    self.assertLen(set(losses), _STEPS * _EPOCHS)
    for job, started in _JOBS.items():
      with self.subTest(job):
        logs = log(*started)
        got = [each['loss'] for each in logs]
        np.testing.assert_allclose(got, losses, rtol=0, atol=1e-6)
        self.assertEqual('communication' in logs[-1], job == 'ring')
        if job == 'ring':
          self.assertGreater(logs[-1]['examples/s'], 0)


if __name__ == '__main__':
  absltest.main()

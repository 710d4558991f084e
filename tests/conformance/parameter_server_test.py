"""Training with parameter servers equals one device's.

With one worker, each step reads what the step before it wrote: then every mode
is exact, and so is asynchronous training. The ordinary run has the features in
which servers could differ, the soak run has all.
"""

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import parameter_servers
from tests.conformance import parameter_server
from tests.conformance import parameter_server_programs as programs

_PARTS = 3

# Control flow, sparse gradients, uneven batches, held and direct writes,
# several steps a call, 16 bits.
SOME = (
  'batch_normalization_steps_per_execution',
  'embedding',
  'mixed_float16',
)
SOME_PROGRAMS = (
  'backup_and_restore',
  'custom_train_step',
  'unknown_cardinality_and_steps_per_execution',
)


# What cannot be the same with two workers: metrics of 16-bit values that round to
# ties. What replicas would have to synchronise in a forward pass is refused.
INEXACT_WITH_SHARES = (
  'mixed_bfloat16',
  'sync_batch_normalization',
  'sync_batch_normalization_1_row',
)
FEW_WITH_SHARES = ('last_batch_of_1_row',)
SOME_WITH_SHARES = (
  'batch_normalization_steps_per_execution',
  'dropout_with_seed',
  'embedding',
  'class_weight',
  'ema_overwrite_accumulation_steps_per_execution',
)


@pytest.mark.soak
class OneWorkerTest(
  parameter_server.ServerConformanceTest, parameterized.TestCase
):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.job = parameter_servers.Job(num_workers=1, num_ps=2)
    cls.addClassCleanup(cls.job.__exit__)

  @pytest.mark.soak
  def test_some_equal_one_device(self):
    self.assert_features(self.job, SOME)

  @parameterized.product(part=tuple(range(_PARTS)))
  @pytest.mark.soak
  def test_the_rest_equals_one_device(self, part):
    rest = sorted(set(parameter_server.features()) - set(SOME))
    self.assert_features(self.job, rest[part::_PARTS])

  @parameterized.product(part=tuple(range(_PARTS)))
  @pytest.mark.soak
  def test_synchronous_steps_equal_one_device(self, part):
    names = sorted(parameter_server.features())
    self.assert_features(self.job, names[part::_PARTS], {'mode': 'sync'})

  def test_some_programs_do_what_they_do_on_one_device(self):
    self.assert_programs(self.job, SOME_PROGRAMS)

  @pytest.mark.soak
  def test_the_other_programs_do_what_they_do_on_one_device(self):
    others = sorted(set(programs.PROGRAMS) - set(SOME_PROGRAMS))
    self.assert_programs(self.job, others)

  @pytest.mark.soak
  def test_programs_with_synchronous_steps_do_what_they_do_on_one_device(self):
    self.assert_programs(self.job, sorted(programs.PROGRAMS), {'mode': 'sync'})


class TwoWorkersTest(
  parameter_server.ServerConformanceTest, parameterized.TestCase
):
  """Two workers share the rows of each step; what they make is one step's."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.job = parameter_servers.Job(num_workers=2, num_ps=2)
    cls.addClassCleanup(cls.job.__exit__)

  def test_few_equal_one_device(self):
    self.assert_features(self.job, FEW_WITH_SHARES, {'mode': 'sync'})

  @pytest.mark.soak
  def test_some_equal_one_device(self):
    self.assert_features(self.job, SOME_WITH_SHARES, {'mode': 'sync'})

  @parameterized.product(part=tuple(range(_PARTS)))
  @pytest.mark.soak
  def test_the_rest_equals_one_device(self, part):
    left_out = {
      *FEW_WITH_SHARES,
      *SOME_WITH_SHARES,
      *INEXACT_WITH_SHARES,
    }
    rest = sorted(set(parameter_server.features()) - left_out)
    self.assert_features(self.job, rest[part::_PARTS], {'mode': 'sync'})

  @pytest.mark.soak
  def test_programs_do_what_they_do_on_one_device(self):
    self.assert_programs(self.job, sorted(programs.PROGRAMS), {'mode': 'sync'})


if __name__ == '__main__':
  tf.test.main()

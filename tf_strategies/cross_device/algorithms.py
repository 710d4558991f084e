"""The cross-device ops of well-known algorithms, by name."""

import functools

from tf_strategies import collectives, option_checks
from tf_strategies.cross_device import base


class RingAllReduce(base.ScheduledAllReduce):
  """Ring all-reduce: reduce-scatter, then all-gather, around a ring.

  Each link carries 2(N-1)/N of the bytes, the least that any all-reduce can
  do, in 2(N-1) rounds (Patarasuk and Yuan, 2009). No NCCL is needed, so it
  also runs on virtual GPUs and CPUs. Tensors above 1/N of the bytes are cut
  into chunks (above 1/(2N) between devices with links); smaller ones travel
  whole, in chunks balanced by bytes.

  Example:

    >>> import tensorflow as tf
    >>> strategy = tf.distribute.MirroredStrategy(
    ...   ['CPU:0', 'CPU:1'], cross_device_ops=RingAllReduce())
  """

  def __init__(self) -> None:
    super().__init__('ring')


@option_checks.has_options
class NaiveAllReduce(base.ScheduledAllReduce):
  """Gather to one device, add there, broadcast: the slow baseline.

  The root's link carries (N-1) times the bytes in and as many out.

  Args:
    root: position of the device that adds, in the order of the devices.
  """

  def __init__(self, root: int = 0):
    option_checks.check_int('root', root, 0)
    super().__init__('naive')
    self._build = functools.partial(collectives.naive_all_reduce, root=root)


@option_checks.has_options
class TreeAllReduce(base.ScheduledAllReduce):
  """Binomial tree: reduce to the root in ceil(log2 N) rounds, and back.

  The fewest rounds, so the choice for small tensors over links with latency.

  Args:
    root: position of the root of the tree, in the order of the devices.
  """

  def __init__(self, root: int = 0):
    option_checks.check_int('root', root, 0)
    super().__init__('tree')
    self._build = functools.partial(collectives.tree_all_reduce, root=root)


class HalvingDoublingAllReduce(base.ScheduledAllReduce):
  """Recursive vector halving and distance doubling (Rabenseifner, 2004).

  The ring's bytes in 2 log2(N) rounds where N is a power of two; other sizes
  fold the extra ranks in first (Thakur et al., 2005).
  """

  def __init__(self) -> None:
    super().__init__('halving_doubling')


@option_checks.has_options
class HierarchicalRingAllReduce(base.ScheduledAllReduce):
  """Rings inside groups of devices, and rings across the groups.

  For devices whose links inside a group (a PCIe switch, a socket) are faster
  than those between groups.

  Args:
    group_size: devices in a group, consecutive in the order of the devices; it
      must divide their number. Default: the divisor nearest its square root.
  """

  def __init__(self, group_size: int | None = None):
    if group_size is not None:
      option_checks.check_int('group_size', group_size, 1)
    super().__init__('hierarchical')
    self._build = functools.partial(
      collectives.hierarchical_all_reduce, group_size=group_size
    )


class DirectAllReduce(base.ScheduledAllReduce):
  """Each device owns a share, adds it for all, and sends it to all.

  Two rounds, and the ring's bytes where the shares are balanced. Over shared
  memory whole tensors are the shares, so that nothing is cut or concatenated
  and each sum is one fused addition: the fastest way there.
  """

  _cuts_shared_memory = False

  def __init__(self) -> None:
    super().__init__('direct')

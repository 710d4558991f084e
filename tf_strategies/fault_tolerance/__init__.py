"""Training that continues after failures and preemption."""

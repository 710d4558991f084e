"""Benchmarks: ours beside the peers and a no-op, in one run."""

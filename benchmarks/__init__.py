"""Benchmarks: our code, other libraries and a no-op, measured in one run."""

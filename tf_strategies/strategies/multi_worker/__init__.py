"""Strategies whose replicas are on several workers: processes, or hosts."""

"""Finds the other processes of a job and forms groups of them."""

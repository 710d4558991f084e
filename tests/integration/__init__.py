"""Whole programs on test hosts with networks of their own."""

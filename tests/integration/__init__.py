"""Whole programs on test hosts with their own networks."""

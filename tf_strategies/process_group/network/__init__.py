"""Authenticated connections that carry the frames of the control plane."""

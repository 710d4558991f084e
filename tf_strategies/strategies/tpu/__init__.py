"""Training on TPUs."""

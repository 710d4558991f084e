"""Parameter servers: placement, steps on workers, what reaches the variables."""

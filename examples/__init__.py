"""Complete training programs; each opens with the command that runs it."""

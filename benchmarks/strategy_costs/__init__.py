"""What `strategies` measures: jobs, the program of their tasks, results."""

"""What trains with parameter servers: ours, TensorFlow's, and their tasks."""

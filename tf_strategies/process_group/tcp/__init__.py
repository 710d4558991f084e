"""The process group over TCP."""

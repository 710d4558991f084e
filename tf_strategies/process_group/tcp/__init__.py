"""Process groups over TCP."""

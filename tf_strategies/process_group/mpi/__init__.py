"""Process groups over MPI."""

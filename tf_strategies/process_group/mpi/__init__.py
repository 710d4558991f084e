"""The process group over MPI."""

"""A controller in one process, and ranks in others that Ray has started."""

"""A controller in one process, and ranks in processes that Ray starts."""

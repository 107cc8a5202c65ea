"""What travels between the ranks, and how it is counted and timed."""

"""Communication between the ranks, with counters and times."""

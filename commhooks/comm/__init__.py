"""Communication between the ranks, with its counters and times."""

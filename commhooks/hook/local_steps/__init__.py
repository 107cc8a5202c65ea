"""`diloco` and `local_sgd`: every rank trains for itself, and once in several steps the ranks come together."""

"""`commhooks network`: what the network between the ranks can do, and what a step of training spends on it."""

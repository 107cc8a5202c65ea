"""`commhooks doctor`: measures hooks and advises."""

"""`commhooks doctor`: measures hooks and recommends one, or none."""

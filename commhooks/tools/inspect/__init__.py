"""`commhooks inspect`: show the hook state in a checkpoint."""

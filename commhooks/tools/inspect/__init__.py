"""`commhooks inspect`: what a checkpoint holds of a hook."""

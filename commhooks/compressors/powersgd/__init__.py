"""PowerSGD: low-rank gradients with error feedback."""

"""PowerSGD: low-rank gradient compression with error feedback."""

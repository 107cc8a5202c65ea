"""Gradients: their buckets and layouts, the names of parameters, and DDP as their source."""

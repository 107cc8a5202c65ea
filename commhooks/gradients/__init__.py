"""Gradients: their buckets and layouts, the names of parameters, and their sources: DDP and FSDP2."""

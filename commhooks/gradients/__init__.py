"""Gradients: buckets and layouts, names of parameters, and the sources of gradients: DDP, FSDP2 and
unwrapped modules.
"""

"""Compressors: how a bucket of gradients is averaged over the ranks."""

"""Compress FSDP2's own collectives: its all-gather of weights and its reduce-scatter of gradients.

Nothing is learned, so nothing is saved. Read `gather.py` and `scatter.py` first, then `codec.py`.
"""

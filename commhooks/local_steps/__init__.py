"""Local SGD and DiLoCo: every rank trains on its own gradients, and the weights are averaged once
in several steps.
"""

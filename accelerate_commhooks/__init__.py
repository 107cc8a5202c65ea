"""commhooks for Hugging Face Accelerate: not there yet.

This package is reserved for `CommHookKwargs`, the kwargs handler that will attach a communication hook to the model
that `Accelerator.prepare` wraps. Until then use `commhooks.attach` on the wrapped model.
"""

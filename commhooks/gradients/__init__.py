"""Where gradients come from and lie."""

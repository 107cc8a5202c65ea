"""A quantised all-reduce with error feedback: gradients travel as 8-bit or 4-bit integers with a scale per block."""

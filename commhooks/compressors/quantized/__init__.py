"""A quantised all-reduce with error feedback: 8-bit or 4-bit integers with a scale per block."""

"""`hook="auto"`: measure, choose one of the other compressors, and delegate to it."""

"""The hook auto measures the other compressors, chooses one, and delegates to it."""

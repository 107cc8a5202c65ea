"""The hook auto: it measures the other compressors, chooses one, and delegates to it."""

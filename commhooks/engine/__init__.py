"""One backward pass as a transaction over all buckets."""

"""The engine runs each backward pass as a transaction over all buckets."""

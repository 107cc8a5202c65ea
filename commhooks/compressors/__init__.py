"""What is done to a bucket of gradients."""

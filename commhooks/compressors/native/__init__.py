"""Native kernels for the CPU: what the kernels of all compressors share."""

"""C kernels for the CPU: one library for PowerSGD and the quantised hooks."""

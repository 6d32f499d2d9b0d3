"""The decoding step on a CPU as compiled kernels: weights streamed in their stored type, every row's bits its own."""

"""The decoding step on CUDA as captured graphs of a few Triton kernels and torch's products."""

"""The decoding step on CUDA as captured graphs of a few Triton kernels."""

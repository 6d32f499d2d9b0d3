"""Kernels that compute decoding steps in the decoder's place, where they exist for a device and a model."""

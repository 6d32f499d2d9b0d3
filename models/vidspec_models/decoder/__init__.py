"""The language model as one lean loop over fused weights, with its caches, shape rules and device placement."""

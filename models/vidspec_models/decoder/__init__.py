"""The language model as one lean loop over fused weights, and what it needs: caches, shape rules, devices."""

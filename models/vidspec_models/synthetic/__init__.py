"""Models of real shapes with random weights, to measure the engine's speed where no checkpoint is available."""

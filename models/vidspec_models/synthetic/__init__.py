"""Models of real shapes with random weights: they measure the machinery's speed where no checkpoint can be had."""

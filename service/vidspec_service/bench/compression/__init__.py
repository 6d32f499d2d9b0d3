"""`vidspec bench compression`: what DyCoke on the target costs in accuracy and saves in time and memory."""

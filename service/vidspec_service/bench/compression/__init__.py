"""`vidspec bench compression`: what video compression on the target costs in accuracy and saves in time and memory."""

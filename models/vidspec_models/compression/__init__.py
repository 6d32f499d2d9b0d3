"""DyCoke (CVPR 2025, arXiv 2411.15024) on the target: fewer video rows in the prompt, fewer attended while decoding."""

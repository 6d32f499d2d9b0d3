"""What both workers need: prompts prepared beside the loop, and how busy it is."""

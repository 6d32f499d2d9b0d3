"""The page at `/`: its files, and the sample clips that it offers."""

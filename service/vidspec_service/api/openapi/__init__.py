"""What /docs says beyond the routes' own types."""

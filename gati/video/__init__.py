"""Video: sources."""

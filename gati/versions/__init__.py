"""The model repository: versions of retrained caches, their origin, which one serves, the way back."""

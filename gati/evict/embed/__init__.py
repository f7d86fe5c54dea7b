"""Embedding rows in a cache of their own: `EmbeddingCache`, its slow tiers, and the pool of pages they share."""

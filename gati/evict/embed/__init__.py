"""Embedding rows in a cache of their own: `EmbeddingCache`, its slow tiers, and a pool of pages."""

"""A cache for embedding rows: `EmbeddingCache`, its slow tiers, and a pool of pages."""

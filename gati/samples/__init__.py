"""The record store: sampled inputs with the answers of the base model, bounded in size and age."""

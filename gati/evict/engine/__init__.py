"""A small language model engine: keys and values in pages, prefixes kept under any policy."""

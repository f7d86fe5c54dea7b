"""What a network, a segment or a lookup costs on a backend: measured, bounded from below, and kept."""

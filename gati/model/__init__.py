"""The base model: loading it and its data safely, finding its blocks, watching and cutting it."""

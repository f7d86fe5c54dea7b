"""The adaptation service: one process for several models, separate from serving.

It reads the samples that inference services keep in a record store, retrains the active caches on them,
at intervals or when the samples require it, and publishes better ones in the model repository, from which the
inference services load them. `python -m services.adaptation SETTINGS` runs it; `gati serve` starts one for
models with both a record store and a repository.
"""

"""The inference service: one process, one model. It owns the engine and the queue in front of it.

`python -m services.inference` with its settings as JSON (see `services.inference.settings`) runs it;
`gati serve` starts one for each replica of each model.
"""

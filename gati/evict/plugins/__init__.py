"""Gati's policies inside serving engines: vLLM's CPU tier, SGLang's radix cache, LMCache's CPU cache."""

"""The prefix engine behind OpenAI's `/v1/completions`."""

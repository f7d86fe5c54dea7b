#!/bin/sh
# SGLang, whose radix cache asks Gati which leaves to evict.
export GATI_EVICT_CONFIG='{"policy": "gati", "predictor": "reuse"}'
exec python -m sglang.launch_server --model-path "${1:-Qwen/Qwen2.5-7B-Instruct}" \
  --page-size 16 --radix-cache-backend gati

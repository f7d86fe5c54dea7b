#!/bin/sh
# SGLang, whose radix cache asks Gati which leaves to evict.
[ -n "$GATI_EVICT_CONFIG" ] || export GATI_EVICT_CONFIG='{"policy": "gati", "predictor": "reuse"}'
[ $# -gt 0 ] || set -- Qwen/Qwen2.5-7B-Instruct
exec sglang serve --model-path "$@" \
  --page-size 16 --radix-cache-backend gati

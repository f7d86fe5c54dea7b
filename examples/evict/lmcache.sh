#!/bin/sh
# vLLM with LMCache, whose CPU cache of 32 GB asks Gati what to evict.
[ -n "$GATI_EVICT_CONFIG" ] || export GATI_EVICT_CONFIG='{"policy": "gati", "predictor": "reuse"}'
[ $# -gt 0 ] || set -- Qwen/Qwen2.5-7B-Instruct
export LMCACHE_LOCAL_CPU=True LMCACHE_MAX_LOCAL_CPU_SIZE=32 LMCACHE_CACHE_POLICY=GATI
exec vllm serve "$@" --kv-transfer-config '{
  "kv_connector": "LMCacheConnectorV1",
  "kv_role": "kv_both"
}'

#!/bin/sh
# vLLM with 32 GiB of CPU memory behind the GPU's KV cache, of which Gati decides what leaves.
[ -n "$GATI_EVICT_CONFIG" ] || export GATI_EVICT_CONFIG='{"policy": "gati", "predictor": "reuse"}'
[ $# -gt 0 ] || set -- Qwen/Qwen2.5-7B-Instruct
exec vllm serve "$@" --kv-transfer-config '{
  "kv_connector": "OffloadingConnector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "cpu_bytes_to_use": 34359738368,
    "eviction_policy": "GatiCachePolicy",
    "cache_policy_module_path": "gati.evict.plugins.vllm"
  }
}'

"""The alerts and metrics that a watched fleet has, by name.

The rule files lie in the chart and not in the wheel, so the names stand here; a test compares them
with the rules as shipped.
"""

from __future__ import annotations

ALERTS = (
    *("WarmlaneErrorRatioHigh", "WarmlaneTtftBudgetBurn", "WarmlanePoolUnavailable"),
    *("WarmlaneCacheFull", "WarmlaneEvictionsFrequent", "WarmlaneHitRateFalling"),
    *("WarmlaneTtftRising", "WarmlaneCacheThrashing", "WarmlaneIndexGap", "WarmlaneIndexStale"),
    *("WarmlaneParityDiverged", "WarmlaneWorkerEjected", "WarmlaneRedisAway"),
    *("WarmlaneRestoreSlowerThanRecompute", "WarmlaneGpuStallByRestore", "WarmlaneQueueRefusing"),
    *("WarmlaneEventLoopLag", "WarmlaneConfigReloadFailed", "WarmlaneDiscoveryStale"),
    *("WarmlaneTracesLost", "WarmlaneTargetDown"),
)

# Of the gateway, and there however little happened.
METRICS = (
    *("warmlane_build_info", "warmlane_requests_total", "warmlane_ttft_seconds"),
    *("warmlane_observed_hit_tokens_total", "warmlane_computed_prompt_tokens_total"),
    *("warmlane_predicted_hit_tokens_total", "warmlane_ttft_by_hit_seconds"),
    *("warmlane_gate_waiting", "warmlane_gate_refused_total", "warmlane_queued_prefill_seconds"),
    *("warmlane_worker_ready", "warmlane_worker_parity", "warmlane_worker_ejected"),
    *("warmlane_worker_kv_usage_ratio", "warmlane_worker_evictions_total"),
    *("warmlane_worker_restore_stall_seconds_total", "warmlane_worker_cache_value_seconds"),
    *("warmlane_index_blocks", "warmlane_kv_event_gaps_total", "warmlane_kv_event_losses_total"),
    *("warmlane_kv_event_health", "warmlane_kv_event_removed_blocks_total"),
    *("warmlane_event_loop_lag_seconds", "warmlane_tenant_tokens_total"),
)
# Likewise, but only where that part is configured.
OPTIONAL_METRICS = (
    *("warmlane_redis_up", "warmlane_spans_total", "warmlane_discovery_up"),
    *("warmlane_config_last_reload_success", "warmlane_index_pool_age_seconds"),
    "warmlane_worker_kv_filled_ratio",
)

# The contract's twelve: absent where nobody reports them.
BARE_METRICS = (
    *("prefix_cache_hit_rate", "ttft_avg", "ttft_p95", "ttft_p99", "kv_cache_gpu_usage_bytes"),
    *("kv_cache_cpu_usage_bytes", "kv_cache_offload_read_latency"),
    *("kv_cache_offload_write_latency", "prefix_cache_hit_tokens", "prefix_cache_miss_tokens"),
    *("kv_cache_eviction_count", "gpu_stall_due_to_kv_restore"),
)

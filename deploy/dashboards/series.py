"""The series that dashboards read, and the variables that each of them can be filtered by.

A filter by a label that a series does not have would find nothing as soon as a value is chosen, so
which labels there are is written down once. A test compares it with what real processes export.
"""

from __future__ import annotations

from typing import Final

_POOL_WORKER: Final = ("pool", "worker")
_POOL: Final = ("pool",)
_WORKER: Final = ("worker",)
_NONE: Final[tuple[str, ...]] = ()

_BY_FILTERS: Final[dict[tuple[str, ...], str]] = {
    _POOL_WORKER: """
        warmlane_requests_total warmlane_retries_total warmlane_prompt_tokens_total
        warmlane_completion_tokens_total warmlane_predicted_hit_tokens_total
        warmlane_observed_hit_tokens_total warmlane_computed_prompt_tokens_total
        warmlane_hit_prediction_error_tokens_total
        warmlane_ttft_seconds warmlane_predicted_ttft_seconds warmlane_request_duration_seconds
        warmlane_output_token_seconds
        warmlane_worker_ready warmlane_worker_exact warmlane_worker_parity warmlane_worker_apart
        warmlane_worker_ejected warmlane_worker_bias
        warmlane_in_flight_requests warmlane_queued_tokens
        warmlane_worker_running_requests warmlane_worker_waiting_requests
        warmlane_worker_kv_usage_ratio warmlane_worker_kv_filled_ratio
        warmlane_batch_headroom_requests
        warmlane_worker_kv_bytes warmlane_worker_evictions_total
        warmlane_worker_restore_stall_seconds_total warmlane_worker_offload_seconds
        warmlane_worker_cache_value_seconds
        warmlane_index_blocks warmlane_worker_event_age_seconds warmlane_kv_event_lag_seconds
        warmlane_kv_event_health warmlane_kv_event_gaps_total warmlane_kv_event_losses_total
        warmlane_kv_event_replays_total warmlane_kv_event_restarts_total
        warmlane_kv_event_decode_errors_total warmlane_kv_event_unknown_total
        warmlane_kv_event_orphans_total warmlane_kv_event_rejected_total
        warmlane_kv_event_implausible_total warmlane_kv_event_stored_blocks_total
        warmlane_kv_event_removed_blocks_total
        warmlane_pulls_total warmlane_pulled_tokens_total
    """,
    _POOL: """
        warmlane_routing_decisions_total warmlane_routed_requests_total warmlane_route_seconds
        warmlane_sources_total warmlane_queue_seconds warmlane_gate_waiting
        warmlane_gate_refused_total warmlane_retries_refused_total warmlane_unread_prompts_total
        warmlane_miss_tokens_total warmlane_queued_prefill_seconds
        warmlane_ttft_by_hit_seconds warmlane_prefill_by_hit_seconds
        warmlane_prompt_tokens_by_hit_total
        warmlane_index_pool_age_seconds warmlane_index_leases warmlane_index_pending_blocks
        warmlane_index_published_blocks_total
        warmlane_other_gateways warmlane_load_age_seconds
        warmlane_warm_keep_runs_total warmlane_worth_reuse_gain_seconds warmlane_worth_saved_seconds
        warmlane_worth_cost_seconds warmlane_worth_lost_tokens warmlane_worth_verdict
        warmlane_discovery_up warmlane_discovery_workers warmlane_discovery_failures_total
    """,
    _WORKER: """
        warmlane_warm_computed_tokens_total warmlane_warm_cached_tokens_total
        warmlane_warm_failed_total warmlane_warm_hit_tokens_total warmlane_warm_documents
    """,
    _NONE: """
        warmlane_build_info warmlane_event_loop_lag_seconds warmlane_label_overflows_total
        warmlane_spans_total warmlane_redis_up warmlane_redis_outages_total
        warmlane_redis_errors_total warmlane_index_age_seconds warmlane_load_reports_total
        warmlane_warm_stored_prompts warmlane_warm_stored_bytes
        warmlane_tenant_tokens_total warmlane_tenant_requests_total
        warmlane_tenant_saved_seconds_total process_cpu_seconds_total process_resident_memory_bytes
        vllm:num_preemptions_total
        warmlane_runner_prefix_cache_hit_tokens_total
        warmlane_runner_prefix_cache_miss_tokens_total warmlane_runner_kv_blocks
        warmlane_runner_kv_cache_usage_bytes warmlane_runner_kv_cache_capacity_bytes
        warmlane_runner_kv_cache_evictions_total warmlane_runner_requests_loading
        warmlane_runner_reuse_gain_predicted_seconds_total
        warmlane_runner_reuse_gain_actual_seconds_total
        warmlane_runner_reuse_loss_actual_seconds_total
        warmlane_runner_ttft_seconds warmlane_runner_transfer_seconds
        warmlane_runner_transfer_bytes_total warmlane_runner_restores_gated_total
        warmlane_runner_loads_failed_total warmlane_runner_stores_dropped_total
        warmlane_runner_stores_failed_total warmlane_runner_damaged_blocks_total
        warmlane_runner_tier_paused warmlane_tier_queue_bytes warmlane_tier_oldest_seconds
        warmlane_peer_pull_bytes_total warmlane_peer_pull_seconds_total
        warmlane_peer_pulls_failed_total warmlane_peer_served_bytes_total
        warmlane_peer_refused_total warmlane_peer_cut_short_total
    """,
}

FILTERS: Final[dict[str, tuple[str, ...]]] = {
    name: labels for labels, names in _BY_FILTERS.items() for name in names.split()
}
"""Family -> variables besides ``job`` and ``instance`` that it is filtered by."""

HISTOGRAM_PARTS: Final = ("_bucket", "_sum", "_count")


def family_of(series: str) -> str:
    """Return the family that a series belongs to.

    Raises:
        KeyError: If no dashboard may read it: add it above, with its labels.
    """
    if series in FILTERS:
        return series
    for part in HISTOGRAM_PARTS:
        if series.endswith(part) and series.removesuffix(part) in FILTERS:
            return series.removesuffix(part)
    raise KeyError(series)

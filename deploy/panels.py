"""What the dashboard shows. `python -m deploy.make_dashboard` writes it for Grafana.

A panel is a title, a unit, a text that explains it, and queries with their legends. With replicas
every metric of an engine has the label `replica`; without, legends have nothing in its place.
"""

from __future__ import annotations

Panel = tuple[str, str, str, list[tuple[str, str]]]
HERE = 'instance=~"$instance"'


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """A counter's increase per second over all instances."""
    matchers = ",".join(filter(None, (HERE, labels)))
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(gemserve_{metric}{{{matchers}}}[$__rate_interval]))"


def gauge(metric: str, prefix: str = "gemserve_") -> str:
    return f"{prefix}{metric}{{{HERE}}}"


def quantiles(metric: str, *shares: float, by: str = "") -> list[tuple[str, str]]:
    """Quantiles of a histogram."""
    grouped = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        (f"histogram_quantile({q}, {rate(f'{metric}_bucket', grouped)})", f"p{q * 100:g}{legend}")
        for q in shares
    ]


def mean(metric: str) -> str:
    return f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}"


OUTCOMES = 'outcome=~"applied|diffuse_attention|widened"'
INGRESS = 'replica="ingress"'
FALLBACKS = 'outcome=~"diffuse_attention|widened"'
ROWS: list[tuple[str, list[Panel]]] = [
    (
        "Requests",
        [
            (
                "Requests ended",
                "reqps",
                "By finish reason. `abort`: the client left. `error`: the engine failed.",
                [(rate("request_success_total", "finish_reason"), "{{finish_reason}}")],
            ),
            (
                "Running and waiting",
                "short",
                "Requests in progress, and requests in the queue.",
                [
                    (gauge("num_requests_running"), "running {{instance}} {{replica}}"),
                    (gauge("num_requests_waiting"), "waiting {{instance}} {{replica}}"),
                ],
            ),
            (
                "Refused requests",
                "reqps",
                "By reason. `queue_full`: the server is overloaded.",
                [(rate("admission_rejections_total", "reason"), "{{reason}}")],
            ),
            (
                "HTTP replies",
                "reqps",
                "Replies to every path, by status.",
                [(rate("http_responses_total", "status"), "{{status}}")],
            ),
            (
                "Engine",
                "short",
                "1 while the engine lives.",
                [(gauge("engine_up"), "{{instance}} {{replica}}")],
            ),
            (
                "Requests with adapters",
                "reqps",
                "Requests that name an adapter.",
                [(rate("adapter_requests_total"), "requests")],
            ),
            (
                "Errors caught",
                "ops",
                "Errors inside the server that it has survived, by where. The log has each.",
                [(rate("internal_errors_total", "where"), "{{where}}")],
            ),
        ],
    ),
    (
        "Latency",
        [
            (
                "Time to first token",
                "s",
                "From arrival to the first token.",
                quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
            ),
            (
                "Between tokens",
                "s",
                "Gaps between the tokens of one stream.",
                quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99),
            ),
            (
                "Whole request",
                "s",
                "From arrival to the last token.",
                quantiles("e2e_request_latency_seconds", 0.5, 0.95, 0.99),
            ),
            (
                "Where a request's time goes",
                "s",
                "Means. A request waits, is filtered if it is long, is read, and is answered.",
                [
                    (mean("request_queue_time_seconds"), "queue"),
                    (mean("filter_time_seconds"), "filter"),
                    (mean("request_prefill_time_seconds"), "prefill"),
                    (mean("request_decode_time_seconds"), "decode"),
                ],
            ),
            (
                "Queue",
                "s",
                "From arrival to the first step.",
                quantiles("request_queue_time_seconds", 0.5, 0.95),
            ),
            (
                "Time per output token",
                "s",
                "One request's tokens after its first, on average over that request.",
                [
                    *quantiles("request_time_per_output_token_seconds", 0.5, 0.95),
                ],
            ),
        ],
    ),
    (
        "Tokens",
        [
            (
                "Tokens per second",
                "short",
                "Prompt tokens as they were sent, those left after filtering, and tokens drawn.",
                [
                    (rate("prompt_tokens_total"), "prompt"),
                    (rate("kept_prompt_tokens_total"), "kept"),
                    (rate("generation_tokens_total"), "generated"),
                ],
            ),
            (
                "Prompt length",
                "short",
                "Tokens of a prompt as it was sent.",
                quantiles("request_prompt_tokens", 0.5, 0.95),
            ),
            (
                "Answer length",
                "short",
                "Tokens of an answer.",
                quantiles("request_generation_tokens", 0.5, 0.95),
            ),
        ],
    ),
    (
        "Filter",
        [
            (
                "What became of the filter",
                "reqps",
                "Prompts by outcome. `short_prompt` and `disabled` are not filtered.",
                [(rate("filter_requests_total", "outcome"), "{{outcome}}")],
            ),
            (
                "Fallback",
                "percentunit",
                "Share of filtered prompts whose attention was diffuse, so that more was kept.",
                [
                    (
                        f"({rate('filter_requests_total', '', FALLBACKS)} or vector(0)) / "
                        f"{rate('filter_requests_total', '', OUTCOMES)}",
                        "fallback",
                    )
                ],
            ),
            (
                "Coverage",
                "percentunit",
                "How focused the question's attention is. Low values mean diffuse attention.",
                quantiles("filter_coverage", 0.1, 0.5, 0.9),
            ),
            (
                "Share kept",
                "percentunit",
                "Share of a filtered prompt that was kept.",
                quantiles("filter_kept_ratio", 0.5, 0.95),
            ),
            (
                "Filter time",
                "s",
                "Filter pass and selection of one prompt.",
                quantiles("filter_time_seconds", 0.5, 0.95, 0.99),
            ),
            (
                "Prompt tokens found in the document cache",
                "short",
                "Tokens per second that the filter did not have to read again.",
                [(rate("cached_prompt_tokens_total"), "cached")],
            ),
            (
                "Windows",
                "short",
                "Windows of documents per second: `read`, or found in the document `cache`.",
                [(rate("windows_total", "source"), "{{source}}")],
            ),
        ],
    ),
    (
        "Document cache",
        [
            (
                "Passes that find a document",
                "reqps",
                "Passes that looked for a document, and those that found one, by where it was.",
                [
                    (rate("document_cache_queries_total"), "all"),
                    (rate("document_cache_hits_total", "tier"), "found in {{tier}}"),
                ],
            ),
            (
                "Tokens of these passes",
                "short",
                "Per second, and how many of them were found.",
                [
                    (rate("document_cache_query_tokens_total"), "all"),
                    (rate("document_cache_hit_tokens_total", "tier"), "found in {{tier}}"),
                ],
            ),
            (
                "Documents held",
                "bytes",
                "By where they are.",
                [(gauge("document_cache_bytes"), "{{tier}} {{instance}} {{replica}}")],
            ),
            (
                "Documents given up",
                "ops",
                "To make room for others. Many, with few found again: raise --cache-memory.",
                [(rate("document_cache_evictions_total"), "evictions")],
            ),
        ],
    ),
    (
        "Memory",
        [
            (
                "KV memory",
                "percentunit",
                "Held by requests, and held by documents until a request needs it.",
                [
                    (gauge("kv_cache_usage_ratio"), "requests {{instance}} {{replica}}"),
                    (gauge("document_cache_usage_ratio"), "documents {{instance}} {{replica}}"),
                ],
            ),
            (
                "KV cache of one request",
                "bytes",
                "At its peak, filter pass included, and while decoding.",
                quantiles("request_kv_cache_bytes", 0.95, by="stage"),
            ),
            (
                "Adapters",
                "bytes",
                "Memory of adapters that are loaded or in use.",
                [(gauge("adapter_memory_bytes"), "{{instance}} {{replica}}")],
            ),
            (
                "Adapters loaded",
                "short",
                "Adapters in memory.",
                [(gauge("adapters_loaded"), "{{instance}} {{replica}}")],
            ),
            (
                "Resident memory",
                "bytes",
                "Of the process, now.",
                [(gauge("process_resident_memory_bytes", ""), "{{instance}} {{replica}}")],
            ),
            (
                "Processor",
                "short",
                "Cores in use.",
                [
                    (
                        f"rate(process_cpu_seconds_total{{{HERE}}}[$__rate_interval])",
                        "{{instance}} {{replica}}",
                    )
                ],
            ),
        ],
    ),
    (
        "Replicas",
        [
            (
                "Replicas",
                "short",
                "Replicas that take requests, and how many should. Empty with one engine.",
                [
                    (gauge("replicas_ready"), "ready {{instance}}"),
                    (gauge("replicas_wanted"), "wanted {{instance}}"),
                ],
            ),
            (
                "Requests whose replica was lost",
                "reqps",
                "Those that ended with an error, and those that another replica has answered.",
                [
                    (rate("ingress_lost_requests_total"), "lost"),
                    (rate("ingress_retries_total"), "sent to another"),
                ],
            ),
            (
                "Failures of the ingress",
                "ops",
                "Rules of routing that failed, and errors of the ingress itself.",
                [
                    (rate("ingress_router_failures_total"), "router"),
                    (rate("ingress_internal_errors_total"), "internal"),
                ],
            ),
            (
                "Replies of the ingress",
                "reqps",
                "By status.",
                [(rate("ingress_replies_total", "status"), "{{status}}")],
            ),
            (
                "Refused by the ingress",
                "reqps",
                "By reason: keys, quotas, hosts, no replica.",
                [(rate("admission_rejections_total", "reason", INGRESS), "{{reason}}")],
            ),
            (
                "Requests ended by replica",
                "reqps",
                "One that ends far fewer than the others is slow, or new.",
                [(rate("request_success_total", "replica"), "{{replica}}")],
            ),
            (
                "Time to first token by replica",
                "s",
                "From arrival at the replica to the first token.",
                quantiles("time_to_first_token_seconds", 0.95, by="replica"),
            ),
            (
                "Queue by replica",
                "s",
                "From arrival to the first step.",
                quantiles("request_queue_time_seconds", 0.95, by="replica"),
            ),
            (
                "Prompt tokens found by replica",
                "short",
                "Tokens per second that the replica's document cache had.",
                [(rate("cached_prompt_tokens_total", "replica"), "{{replica}}")],
            ),
        ],
    ),
]

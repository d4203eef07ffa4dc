"""Names of spans' attributes, kept here because the package that has them calls them deprecated.

Source: open-telemetry/semantic-conventions-genai, docs/gen-ai/client-inference.md (commit 024a4f9);
open-telemetry/semantic-conventions, docs/http/http-spans.md and docs/general/attributes.md.
"""

from __future__ import annotations

# HTTP.
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
HTTP_RESEND_COUNT = "http.request.resend_count"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

# Generative AI. Times are in seconds; input tokens include those read from a cache.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_write.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
# Only with telemetry.log_prompts.
INPUT_MESSAGES = "gen_ai.input.messages"

# What a surface's requests ask for, in the convention's words where it has one.
OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}

# The gateway's own. Times are in seconds.
REQUEST_ID = "warmlane.request_id"
TENANT = "warmlane.tenant"
POOL = "warmlane.pool"
WORKER = "warmlane.worker"
OUTCOME = "warmlane.outcome"
QUEUE_TIME = "warmlane.queue_time"
ROUTING_REASON = "warmlane.routing.reason"
ROUTING_PREDICTED_HIT_TOKENS = "warmlane.routing.predicted_hit_tokens"
ROUTING_PREDICTED_TTFT = "warmlane.routing.predicted_ttft"
ROUTING_PROMPT_TOKENS = "warmlane.routing.prompt_tokens"
ROUTING_SOURCE = "warmlane.routing.source"
ROUTING_CANDIDATES = "warmlane.routing.candidates"
ROUTING_INDEX_AGE = "warmlane.routing.index_age"

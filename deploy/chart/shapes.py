"""What values of the chart may be, by their path: where more is to be said than the default's type.

Keys of ``SHAPES`` are dotted paths in which ``*`` stands for one key or several; the first one that
matches counts.
"""

from __future__ import annotations

from typing import Any

from deploy.chart.values import alert_names
from gateway.telemetry.requests import TTFT_BUCKETS_S

Schema = dict[str, Any]

# Names of Kubernetes objects, empty for "none".
OBJECT_NAME = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
# Sizes as the runner reads them: 512MiB, 20GB, bytes; for its pool also tokens (32Ki).
BYTES = r"^([0-9]+(\.[0-9]+)? ?([KMGTkmgt]i?)?[Bb]?)?$"
QUANTITY = r"^([0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?)?$"
DURATION = r"^[0-9]+(ms|s|m|h)$"
# As the Gateway API writes durations (GEP-2257).
ROUTE_DURATION = r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"
CRON = r"^(@(hourly|daily|weekly|monthly|yearly|annually|midnight)|([^ ]+ +){4}[^ ]+)$"


def text(pattern: str | None = None) -> Schema:
    """A string."""
    return {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}


def whole(least: int, most: int) -> Schema:
    """A whole number."""
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*choices: str) -> Schema:
    """One of some words."""
    return {"enum": list(choices)}


def map_of(items: Schema, key: str | None = None) -> Schema:
    """A mapping whose keys are the user's."""
    shape: Schema = {"type": "object", "additionalProperties": items}
    return shape if key is None else {**shape, "propertyNames": {"pattern": key}}


def list_of(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


# Handed on as it is: Kubernetes, Prometheus' operator or KEDA checks it.
VERBATIM: Schema = {"type": "object"}
PORT = whole(1, 65535)
# Beyond this many pods a values file has a typing error.
PODS = whole(1, 1000)
SECONDS = whole(1, 86_400)

IMAGE: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        # A tag or digest in here would end up in the middle of the image's name.
        "repository": text(r"^[a-z0-9.-]+(:[0-9]+/[^\s:@]+|/[^\s:@]+)?$"),
        "tag": {"pattern": r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$", "not": {"const": "latest"}},
        "digest": text(r"^(sha256:[0-9a-f]{64})?$"),
        "pullPolicy": one_of("Always", "IfNotPresent", "Never"),
        "pullSecrets": list_of(text(OBJECT_NAME)),
    },
}
IMAGE["properties"]["tag"]["type"] = "string"

SECRET: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "existingSecret": text(OBJECT_NAME),
        "existingSecretKey": text(r"^[-._a-zA-Z0-9]{1,253}$"),
        "value": text(),
    },
}

RESOURCES: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "requests": map_of({"type": ["string", "number"]}),
        "limits": map_of({"type": ["string", "number"]}),
        "claims": list_of(VERBATIM),
    },
}

# The chart's own are what selectors go by.
LABELS: Schema = {
    **map_of(text(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")),
    "propertyNames": {"not": {"pattern": r"^(app\.kubernetes\.io|helm\.sh)/"}},
}

# Strictly between: 0 always passes, 1 never.
RATIO: Schema = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
ALERTS = alert_names()
# A label of a rule hides the one of what it is about, and some alerts are joined by those.
ALERT_LABELS: Schema = {
    **map_of({"type": "string", "minLength": 1}),
    "propertyNames": {
        "pattern": r"^[A-Za-z_][A-Za-z0-9_]*$",
        "not": {
            "pattern": r"^(__.*|alertname|alertstate|severity|namespace|pool|worker|state|why"
            r"|instance|job)$"
        },
    },
}

SHAPES: dict[str, Schema] = {
    "global": VERBATIM,
    "nameOverride": text(OBJECT_NAME),
    "fullnameOverride": text(OBJECT_NAME),
    "image": IMAGE,
    "runnerImage": IMAGE,
    "vllmImage": IMAGE,
    "*.image": IMAGE,
    "secrets.tls.existingSecret": text(OBJECT_NAME),
    "secrets.env": map_of(SECRET, ENV_NAME),
    "secrets.keyFiles": map_of(SECRET, r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"),
    # As the gateway demands of it: shorter ones are guessed.
    "secrets.salt.value": {"type": "string", "anyOf": [{"const": ""}, {"minLength": 16}]},
    # It becomes a part of a URL.
    "secrets.valkeyPassword.value": text(r"^[A-Za-z0-9._~-]*$"),
    "secrets.redisUrl.value": text(r"^((rediss?|redis\+sentinel)://\S+)?$"),
    "*.existingSecret": text(OBJECT_NAME),
    "*.existingSecretKey": SECRET["properties"]["existingSecretKey"],
    "discovery.type": one_of("static", "kubernetes", "dns"),
    "serviceAccount.name": text(OBJECT_NAME),
    "commonLabels": LABELS,
    "*.annotations": map_of(text()),
    "*.podAnnotations": map_of(text()),
    "*.podLabels": LABELS,
    "*.nodeSelector": map_of(text()),
    "metrics.*.labels": LABELS,
    "*.resources": RESOURCES,
    "*.env": map_of(text(), ENV_NAME),
    "*.extraEnv": list_of({**VERBATIM, "required": ["name"]}),
    "*.extraArgs": list_of(text()),
    "*.extraVolumes": list_of({**VERBATIM, "required": ["name"]}),
    "*.extraVolumeMounts": list_of({**VERBATIM, "required": ["name", "mountPath"]}),
    "*.topologySpreadConstraints": list_of(
        {**VERBATIM, "required": ["maxSkew", "topologyKey", "whenUnsatisfiable"]}
    ),
    "*.podSecurityContext": VERBATIM,
    "*.securityContext": VERBATIM,
    "*.affinity": VERBATIM,
    "*.modelVolume": VERBATIM,
    "*.cacheVolume": VERBATIM,
    "*.behavior": VERBATIM,
    "*.service.type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "*.service.port": PORT,
    "*.adminService.port": PORT,
    "engine.port": PORT,
    "engine.kvEvents.*ort": PORT,
    "networkPolicy.redis.port": PORT,
    # Kubernetes 1.30 to 1.32 refuse a sleep of 0 s.
    "gateway.preStopSeconds": whole(1, 600),
    "gateway.graceMarginSeconds": whole(0, 3600),
    "*.replicas": PODS,
    "*.minReplicas": PODS,
    "*.maxReplicas": PODS,
    "*.targetCPUUtilizationPercentage": whole(1, 1000),
    "*.queuedPrefillSeconds": {"type": "number", "exclusiveMinimum": 0},
    "*.prometheusAddress": text(r"^(https?://\S+)?$"),
    "*.triggers": list_of({**VERBATIM, "required": ["type", "metadata"]}),
    "engine.type": one_of("runner", "vllm"),
    "engine.drainSeconds": whole(1, 3600),
    "engine.runner.dtype": one_of("float32", "bfloat16", "int8", "int4"),
    "engine.runner.device": one_of("cpu", "cuda"),
    "engine.runner.threads": whole(1, 1024),
    "engine.runner.servePeers": {"type": "boolean"},
    "engine.runner.*": {"anyOf": [text(BYTES), whole(1, 1 << 62)]},
    "engine.gpu.count": whole(0, 64),
    "engine.gpu.resource": text(r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"),
    "engine.sharedMemory": text(QUANTITY),
    "valkey.maxmemory": text(r"^[1-9][0-9]*([kmgKMG][bB]?|[bB])?$"),
    "metrics.serviceMonitor.interval": text(DURATION),
    "metrics.serviceMonitor.scrapeTimeout": text(DURATION),
    "metrics.prometheusRule.bounds.ttftSeconds": {"enum": list(TTFT_BUCKETS_S)},
    # The alert fires at 14.4 times this, and no share is above 1.
    "metrics.prometheusRule.bounds.ttftLateRatio": {**RATIO, "exclusiveMaximum": 0.06},
    "metrics.prometheusRule.bounds.*": RATIO,
    "metrics.prometheusRule.severities": {
        **map_of(one_of("critical", "warning", "info", "none")),
        "propertyNames": {"enum": ALERTS},
    },
    "metrics.prometheusRule.alertLabels": ALERT_LABELS,
    "metrics.prometheusRule.disabledAlerts": list_of({"enum": ALERTS}),
    "metrics.prometheusRule.runbookBaseUrl": text(r"^(https?://\S+)?$"),
    "metrics.dashboards.labelKey": {"type": "string", "minLength": 1},
    "warmup.schedule": text(CRON),
    "warmup.manifest": VERBATIM,
    "warmup.files": map_of(text(), r"^[-._a-zA-Z0-9]+$"),
    "warmup.backoffLimit": whole(0, 100),
    "httpRoute.paths": {**list_of(text(r"^/")), "minItems": 1},
    "httpRoute.hostnames": list_of(text(r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")),
    "httpRoute.timeout": {"anyOf": [{"const": ""}, text(ROUTE_DURATION)]},
    "extraObjects": list_of({"anyOf": [{**VERBATIM, "required": ["apiVersion", "kind"]}, text()]}),
    "*Seconds": SECONDS,
}

{{/* HorizontalPodAutoscaler or KEDA ScaledObject (root, where, part, component, name, kind; for a
     set also set). */}}
{{- define "warmlane.scaler" -}}
{{- if include "warmlane.autoscaled" . }}
{{- if .part.autoscaling.hpa.enabled }}
{{- include "warmlane.hpa" . }}
{{- else }}
{{- include "warmlane.scaledObject" . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Refuses scaling on CPU without a request to measure it by (where, part). */}}
{{- define "warmlane.needsCpuRequest" -}}
{{- if not (dig "resources" "requests" "cpu" "" .part) -}}
{{- fail (printf "%s.autoscaling: scaling on CPU is relative to the request; expected %s.resources.requests.cpu, or metrics or triggers of your own" .where .where) -}}
{{- end -}}
{{- end -}}

{{- define "warmlane.hpa" }}
{{- $hpa := .part.autoscaling.hpa }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "warmlane.metadata" . | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: {{ .kind }}, name: {{ quote .name }}}
  minReplicas: {{ $hpa.minReplicas }}
  maxReplicas: {{ $hpa.maxReplicas }}
  metrics:
    {{- if $hpa.metrics }}
    {{- toYaml $hpa.metrics | nindent 4 }}
    {{- else }}
    {{- include "warmlane.needsCpuRequest" . }}
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ $hpa.targetCPUUtilizationPercentage }}}
    {{- end }}
  {{- with $hpa.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "warmlane.scaledObject" }}
{{- $keda := .part.autoscaling.keda }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "warmlane.metadata" . | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: {{ .kind }}, name: {{ quote .name }}}
  minReplicaCount: {{ $keda.minReplicas }}
  maxReplicaCount: {{ $keda.maxReplicas }}
  pollingInterval: {{ $keda.pollingIntervalSeconds }}
  cooldownPeriod: {{ $keda.cooldownSeconds }}
  triggers:
    {{- if $keda.triggers }}
    {{- toYaml $keda.triggers | nindent 4 }}
    {{- else if eq .component "gateway" }}
    {{- include "warmlane.needsCpuRequest" . }}
    - type: cpu
      metricType: Utilization
      metadata:
        value: {{ $keda.targetCPUUtilizationPercentage | toString | quote }}
    {{- else }}
    - type: prometheus
      metadata:
        serverAddress: {{ required (printf "%s.autoscaling.keda: expected prometheusAddress, such as http://prometheus.monitoring:9090, or triggers of your own" .where) $keda.prometheusAddress | quote }}
        # What waits in all gateways of this namespace for this pool, in seconds of prefill; a
        # Prometheus that sets no namespace has one site only.
        query: {{ printf "sum(warmlane_queued_prefill_seconds{pool=%q,namespace=~\"%s|\"})" .part.name .root.Release.Namespace | toJson }}
        threshold: {{ $keda.queuedPrefillSeconds | toString | quote }}
    {{- end }}
{{- end -}}

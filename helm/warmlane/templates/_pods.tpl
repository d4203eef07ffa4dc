{{/* Where and beside whom a pod runs (root, component, part: a section of the values). */}}
{{- define "warmlane.placement" -}}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
{{- with .part.runtimeClassName }}
runtimeClassName: {{ quote . }}
{{- end }}
{{- $labels := fromYaml (include "warmlane.selectorLabels" .) }}
{{- with .part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $own := dict "labelSelector" (dict "matchLabels" $labels) }}
  - {{- toYaml (merge (deepCopy .) $own) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Variables (env: map of strings, extraEnv: as Kubernetes has them), without the key. */}}
{{- define "warmlane.env" -}}
{{- range $name, $value := .env }}
- name: {{ quote $name }}
  value: {{ quote $value }}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A list of arguments, each one to one. */}}
{{- define "warmlane.args" -}}
{{- range . }}
- {{ quote . }}
{{- end }}
{{- end -}}

{{/* Whether a part scales by itself: "true" or "" (root, where, part). */}}
{{- define "warmlane.autoscaled" -}}
{{- $scaling := .part.autoscaling -}}
{{- if and $scaling.hpa.enabled $scaling.keda.enabled -}}
{{- fail (printf "%s.autoscaling: hpa and keda are both enabled, and would undo each other's work; expected one of them" .where) -}}
{{- end -}}
{{- if or $scaling.hpa.enabled $scaling.keda.enabled -}}
{{- $chosen := ternary $scaling.hpa $scaling.keda $scaling.hpa.enabled -}}
{{- if gt (int $chosen.minReplicas) (int $chosen.maxReplicas) -}}
{{- fail (printf "%s.autoscaling: minReplicas %d is above maxReplicas %d" .where (int $chosen.minReplicas) (int $chosen.maxReplicas)) -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* The fewest and the most pods of a part, as {least, most}. */}}
{{- define "warmlane.bounds" -}}
{{- $least := int .part.replicas -}}
{{- $most := $least -}}
{{- if include "warmlane.autoscaled" . -}}
{{- $chosen := ternary .part.autoscaling.hpa .part.autoscaling.keda .part.autoscaling.hpa.enabled -}}
{{- $least = int $chosen.minReplicas -}}
{{- $most = int $chosen.maxReplicas -}}
{{- end -}}
{{ dict "least" $least "most" $most | toJson }}
{{- end -}}

{{/* PodDisruptionBudget (root, where, part, component, name); nothing where it could not be met. */}}
{{- define "warmlane.pdb" -}}
{{- $bounds := fromJson (include "warmlane.bounds" .) -}}
{{- if and .part.pdb.enabled (gt (int $bounds.least) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "warmlane.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "warmlane.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* The pods of one component as a peer of a network policy (root, component). */}}
{{- define "warmlane.peer" -}}
{{ dict "podSelector" (dict "matchLabels" (fromYaml (include "warmlane.selectorLabels" .))) | toJson }}
{{- end -}}

{{/* The ports of a set that the gateway uses. */}}
{{- define "warmlane.workerPorts" -}}
- {protocol: TCP, port: {{ .port }}}
{{- if .kvEvents.enabled }}
- {protocol: TCP, port: {{ .kvEvents.port }}}
- {protocol: TCP, port: {{ .kvEvents.replayPort }}}
{{- end }}
{{- end -}}

{{/* The port that a URL names, else the default (url, default). */}}
{{- define "warmlane.urlPort" -}}
{{- $found := regexFind ":[0-9]+(/|$)" .url -}}
{{- default (toString .default) ($found | trimPrefix ":" | trimSuffix "/") -}}
{{- end -}}

{{/* ServiceMonitor of one component (root, component, name, job, monitor, port, scheme). */}}
{{- define "warmlane.serviceMonitor" }}
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  {{- include "warmlane.metadata" (merge (dict "labels" .monitor.labels) .) | nindent 2 }}
spec:
  selector:
    matchLabels:
      {{- include "warmlane.selectorLabels" . | nindent 6 }}
  namespaceSelector:
    matchNames: [{{ quote .root.Release.Namespace }}]
  endpoints:
    - port: {{ .port }}
      path: /metrics
      scheme: {{ .scheme }}
      {{- if eq .scheme "https" }}
      # The certificate is for the name that clients use, not for a pod's address.
      tlsConfig: {insecureSkipVerify: true}
      {{- end }}
      interval: {{ .monitor.interval }}
      scrapeTimeout: {{ .monitor.scrapeTimeout }}
      relabelings:
        - {targetLabel: job, replacement: {{ .job }}}
        {{- with .monitor.relabelings }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .monitor.metricRelabelings }}
      metricRelabelings:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end -}}

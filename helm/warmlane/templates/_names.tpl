{{/* The base of all names: at most 40 characters, so that what is put behind it fits (a Job of a
     CronJob and a StatefulSet's revision label add eleven to theirs). */}}
{{- define "warmlane.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- include "warmlane.short" (dict "text" .Values.fullnameOverride "max" 40) -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- include "warmlane.short" (dict "text" .Release.Name "max" 40) -}}
{{- else -}}
{{- include "warmlane.short" (dict "text" (printf "%s-%s" .Release.Name $name) "max" 40) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* text, or its beginning and a hash of all of it where it is longer than max. */}}
{{- define "warmlane.short" -}}
{{- $text := .text | replace "." "-" -}}
{{- if le (len $text) (int .max) -}}
{{- $text | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" (trunc (int (sub .max 9)) $text | trimSuffix "-") (sha256sum $text | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* Name of one part (root, part). */}}
{{- define "warmlane.name" -}}
{{- include "warmlane.short" (dict "text" (printf "%s-%s" (include "warmlane.fullname" .root) .part) "max" 52) -}}
{{- end -}}

{{/* Labels that never change once installed (root, component). */}}
{{- define "warmlane.selectorLabels" -}}
app.kubernetes.io/name: {{ include "warmlane.short" (dict "text" (default .root.Chart.Name .root.Values.nameOverride) "max" 63) | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* All labels of an object (root, component, labels: further ones). */}}
{{- define "warmlane.labels" -}}
{{ include "warmlane.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with merge (dict) (default dict .labels) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata without its indentation (root, component, name, labels, annotations). */}}
{{- define "warmlane.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "warmlane.labels" . | nindent 2 }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An image's name (root, image). */}}
{{- define "warmlane.image" -}}
{{- $image := .image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* imagePullSecrets of a pod (root, image). */}}
{{- define "warmlane.pullSecrets" -}}
{{- with (default .root.Values.image.pullSecrets .image.pullSecrets) }}
imagePullSecrets:
  {{- range . }}
  - name: {{ quote . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "warmlane.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "warmlane.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

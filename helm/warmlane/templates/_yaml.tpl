{{/* A value as YAML that every parser reads as it was: toYaml leaves texts such as "=" and 1e-06 to
     the parser's taste, loses the line separators of Unicode, and says nothing when it fails. */}}
{{- define "warmlane.yaml" -}}
{{- if kindIs "map" . -}}
{{- range $key, $value := . }}
{{ include "warmlane.yamlText" $key }}:{{ include "warmlane.yamlBelow" $value }}
{{- end -}}
{{- else if kindIs "slice" . -}}
{{- range . }}
-{{ include "warmlane.yamlItem" . }}
{{- end -}}
{{- else -}}
{{ include "warmlane.yamlScalar" . }}
{{- end -}}
{{- end -}}

{{/* What stands behind a key. */}}
{{- define "warmlane.yamlBelow" -}}
{{- if and (or (kindIs "map" .) (kindIs "slice" .)) . -}}
{{ include "warmlane.yaml" . | trim | nindent 2 }}
{{- else }} {{ include "warmlane.yamlScalar" . }}
{{- end -}}
{{- end -}}

{{/* What stands behind the dash of a list. */}}
{{- define "warmlane.yamlItem" -}}
{{- if and (or (kindIs "map" .) (kindIs "slice" .)) . }} {{ include "warmlane.yaml" . | trim | indent 2 | trim }}
{{- else }} {{ include "warmlane.yamlScalar" . }}
{{- end -}}
{{- end -}}

{{- define "warmlane.yamlScalar" -}}
{{- if kindIs "string" . -}}
{{ include "warmlane.yamlText" . }}
{{- else -}}
{{- /* Only with a point is it a number in YAML 1.1. */ -}}
{{ regexReplaceAll "^(-?[0-9]+)e" (toJson .) "${1}.0e" }}
{{- end -}}
{{- end -}}

{{/* A text without quotes where it can be nothing else. */}}
{{- define "warmlane.yamlText" -}}
{{- $isPlain := and (regexMatch "^[A-Za-z][A-Za-z0-9_./-]*$" .) (not (has (lower .) (list "y" "yes" "n" "no" "on" "off" "true" "false" "null"))) -}}
{{- if $isPlain }}{{ . }}{{ else }}{{ quote . }}{{ end -}}
{{- end -}}

{{/* Labels of pods (root, component, part). Nothing that a new release of the chart changes, so that
     an upgrade alone restarts no engine. */}}
{{- define "warmlane.podLabels" -}}
{{ include "warmlane.selectorLabels" . }}
{{- with merge (dict) (default dict .part.podLabels) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* All variables of the gateway (root, config). */}}
{{- define "warmlane.gatewayEnv" -}}
{{- $root := .root -}}
{{- /* What is written by itself goes where a pod can write. */ -}}
- name: HOME
  value: /tmp
{{- with include "warmlane.secretEnv" (dict "root" $root "where" "secrets.adminToken" "name" (default dict .config.server.access).admin_token_env) }}
{{ . }}
{{- end }}
{{- with include "warmlane.secretEnv" (dict "root" $root "where" "secrets.salt" "name" (default dict .config.security).salt_secret_env) }}
{{ . }}
{{- end }}
{{- with include "warmlane.secretEnv" (dict "root" $root "where" "secrets.redisUrl" "name" "WARMLANE_INDEX__URL") }}
{{ . }}
{{- end }}
{{- if $root.Values.valkey.enabled }}
{{- with include "warmlane.secretEnv" (dict "root" $root "where" "secrets.valkeyPassword" "name" "VALKEY_PASSWORD") }}
{{ . }}
- name: WARMLANE_INDEX__URL
  value: redis://:$(VALKEY_PASSWORD)@{{ include "warmlane.name" (dict "root" $root "part" "valkey") }}:6379/0
{{- end }}
{{- end }}
{{- range $name, $secret := $root.Values.secrets.env }}
{{- $where := printf "secrets.env.%s" $name }}
{{ required (printf "%s: expected existingSecret (and existingSecretKey), or value" $where) (include "warmlane.secretEnv" (dict "root" $root "where" $where "name" $name)) }}
{{- end }}
{{- include "warmlane.env" $root.Values.gateway }}
{{- end -}}

{{/* Volumes from secrets. */}}
{{- define "warmlane.secretVolumes" -}}
{{- if .Values.secrets.keyFiles }}
- name: key-files
  projected:
    # The group of the pods may read them, nobody else.
    defaultMode: 0440
    sources:
      {{- range $name, $secret := .Values.secrets.keyFiles }}
      {{- $where := printf "secrets.keyFiles.%s" $name }}
      {{- $found := required (printf "%s: expected existingSecret (and existingSecretKey), or value" $where) (include "warmlane.secretAt" (dict "root" $ "where" $where)) }}
      {{- $ref := fromJson $found }}
      - secret:
          name: {{ quote $ref.name }}
          items:
            - {key: {{ quote $ref.key }}, path: {{ quote $name }}}
      {{- end }}
{{- end }}
{{- with .Values.secrets.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ quote . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

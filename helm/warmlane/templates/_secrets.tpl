{{/* One secret of the values as {name, key}, or nothing (root, where, secret, key: where the chart
     keeps an inline value). */}}
{{- define "warmlane.secretRef" -}}
{{- $secret := .secret -}}
{{- if and $secret.existingSecret $secret.value -}}
{{- fail (printf "%s: existingSecret and value are both set; expected one of them" .where) -}}
{{- end -}}
{{- if $secret.existingSecret -}}
{{ dict "name" $secret.existingSecret "key" (default "value" $secret.existingSecretKey) | toJson }}
{{- else if $secret.value -}}
{{ dict "name" (include "warmlane.name" (dict "root" .root "part" "secrets")) "key" .key | toJson }}
{{- end -}}
{{- end -}}

{{/* The secrets that have a name in the values, as {where: {secret, key}}. */}}
{{- define "warmlane.secrets" -}}
{{- $all := dict -}}
{{- range $name := list "adminToken" "salt" "hfToken" "redisUrl" "valkeyPassword" -}}
{{- $_ := set $all (printf "secrets.%s" $name) (dict "secret" (get $.Values.secrets $name) "key" $name) -}}
{{- end -}}
{{- range $name, $secret := .Values.secrets.env -}}
{{- $_ := set $all (printf "secrets.env.%s" $name) (dict "secret" $secret "key" (printf "env.%s" $name)) -}}
{{- end -}}
{{- range $name, $secret := .Values.secrets.keyFiles -}}
{{- $_ := set $all (printf "secrets.keyFiles.%s" $name) (dict "secret" $secret "key" (printf "keys.%s" $name)) -}}
{{- end -}}
{{- $_ := set $all "helmTest.apiKey" (dict "secret" .Values.helmTest.apiKey "key" "helmTest") -}}
{{ toJson $all }}
{{- end -}}

{{/* {name, key} of a secret by its place in the values, or nothing (root, where). */}}
{{- define "warmlane.secretAt" -}}
{{- $one := get (fromJson (include "warmlane.secrets" .root)) .where -}}
{{- include "warmlane.secretRef" (dict "root" .root "where" .where "secret" $one.secret "key" $one.key) -}}
{{- end -}}

{{/* What the chart's own Secret holds, as {key: value}. */}}
{{- define "warmlane.inlineSecrets" -}}
{{- $inline := dict -}}
{{- range $where, $one := fromJson (include "warmlane.secrets" .) -}}
{{- $_ := include "warmlane.secretRef" (dict "root" $ "where" $where "secret" $one.secret "key" $one.key) -}}
{{- if $one.secret.value -}}
{{- $_ := set $inline $one.key $one.secret.value -}}
{{- end -}}
{{- end -}}
{{ toJson $inline }}
{{- end -}}

{{/* One variable from a secret, or nothing (root, where, name). */}}
{{- define "warmlane.secretEnv" -}}
{{- with include "warmlane.secretAt" . -}}
- name: {{ quote $.name }}
  valueFrom:
    secretKeyRef: {{ . }}
{{- end -}}
{{- end -}}

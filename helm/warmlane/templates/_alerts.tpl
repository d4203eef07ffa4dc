{{/* Groups of alert rules as JSON: those of rules/warmlane.yaml with what values say of them. */}}
{{- define "warmlane.alertGroups" -}}
{{- $said := .Values.metrics.prometheusRule }}
{{- $bounds := fromYaml (.Files.Get "alert-bounds.yaml") }}
{{- include "warmlane.alertLinks" $said }}
{{- $groups := list }}
{{- range $group := (fromYaml (.Files.Get "rules/warmlane.yaml")).groups }}
{{- $rules := list }}
{{- range $rule := $group.rules }}
{{- $name := $rule.alert | default $rule.record }}
{{- range $bound, $edit := $bounds }}
{{- range $text := dig "texts" $name list $edit }}
{{- $old := include "warmlane.bound" (dict "text" $text "value" $edit.shipped) }}
{{- $new := include "warmlane.bound" (dict "text" $text "value" (index $said.bounds $bound)) }}
{{- $_ := set $rule "expr" (replace $old $new $rule.expr) }}
{{- if $rule.annotations }}
{{- $_ := set $rule.annotations "description" (replace $old $new $rule.annotations.description) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $rule.alert }}
{{- $_ := set $rule "labels" (merge (dict "severity" (index $said.severities $name | default $rule.labels.severity)) $said.alertLabels) }}
{{- if $said.runbookBaseUrl }}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s" (trimSuffix "/" $said.runbookBaseUrl) $rule.annotations.runbook_url) }}
{{- end }}
{{- end }}
{{- if not (has $name $said.disabledAlerts) }}
{{- $rules = append $rules $rule }}
{{- end }}
{{- end }}
{{- $groups = append $groups (set $group "rules" $rules) }}
{{- end }}
{{- toJson (concat $groups $said.extraGroups) }}
{{- end -}}

{{/* A text with a number in it, in one of the ways of alert-bounds.yaml (text, value). */}}
{{- define "warmlane.bound" -}}
{{- $number := toString .value }}
{{- $le := contains "." $number | ternary $number (printf "%s.0" $number) }}
{{- .text | replace "{number}" $number | replace "{le}" $le | replace "{percent}" (toString (round (mulf 100 .value) 4)) }}
{{- end -}}

{{/* The chain alert asks whether its links fire: without one of them it never could. */}}
{{- define "warmlane.alertLinks" -}}
{{- $chain := "WarmlaneCacheThrashing" }}
{{- if not (has $chain .disabledAlerts) }}
{{- range list "WarmlaneCacheFull" "WarmlaneEvictionsFrequent" "WarmlaneHitRateFalling" "WarmlaneTtftRising" }}
{{- if has . $.disabledAlerts }}
{{- fail (printf "metrics.prometheusRule.disabledAlerts: %s is a link of %s, which could never fire without it; disable both, or give the link a severity that you route nowhere (severities)." . $chain) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The worker sets, each with what it does not say itself taken from engine, as a JSON list.
     Adds full (the StatefulSet's and its Service's name), component, served and most. */}}
{{- define "warmlane.sets" -}}
{{- $sets := list -}}
{{- $names := list -}}
{{- range $i, $own := .Values.workers -}}
{{- $where := printf "workers[%d] (%s)" $i $own.name -}}
{{- if has $own.name $names -}}
{{- fail (printf "%s: there is another set of this name; expected names that differ" $where) -}}
{{- end -}}
{{- if has $own.name (list "admin" "config" "dashboards" "discovery" "secrets" "test" "valkey" "warmup") -}}
{{- fail (printf "%s: this name is the chart's own; expected another one" $where) -}}
{{- end -}}
{{- $names = append $names $own.name -}}
{{- $set := mergeOverwrite (deepCopy $.Values.engine) (deepCopy $own) -}}
{{- if and (eq $set.type "vllm") (hasKey $own "runner") -}}
{{- fail (printf "%s: runner has the bundled engine's options, and this is vllm; expected extraArgs" $where) -}}
{{- end -}}
{{- $_ := set $set "where" $where -}}
{{- $_ := set $set "full" (include "warmlane.name" (dict "root" $ "part" $own.name)) -}}
{{- $_ := set $set "component" (printf "worker-%s" $own.name) -}}
{{- if not $set.model -}}
{{- fail (printf "%s: model is not set; expected smollm2 or a path (runner), a name of the hub or a path (vllm)" $where) -}}
{{- end -}}
{{- $isPath := hasPrefix "/" $set.model -}}
{{- $_ := set $set "served" (default (ternary (base $set.model) $set.model $isPath) $set.servedName) -}}
{{- include "warmlane.checkSet" (dict "root" $ "set" $set) -}}
{{- $bounds := fromJson (include "warmlane.bounds" (dict "root" $ "where" $where "part" $set)) -}}
{{- $_ := set $set "most" $bounds.most -}}
{{- $sets = append $sets $set -}}
{{- end -}}
{{ toJson $sets }}
{{- end -}}

{{/* Refuses a set that cannot work (root, set). */}}
{{- define "warmlane.checkSet" -}}
{{- $set := .set -}}
{{- $where := $set.where -}}
{{- if eq $set.type "runner" -}}
{{- if and (ne $set.model "smollm2") (not (hasPrefix "/" $set.model)) -}}
{{- fail (printf "%s: model %q: a runner downloads nothing but smollm2; expected smollm2 or a path such as /models/NAME on modelVolume" $where $set.model) -}}
{{- end -}}
{{- if and (eq $set.runner.device "cuda") (lt (int $set.gpu.count) 1) -}}
{{- fail (printf "%s: runner.device cuda with gpu.count 0; expected a GPU" $where) -}}
{{- end -}}
{{- if and (eq $set.runner.device "cpu") (gt (int $set.gpu.count) 0) -}}
{{- fail (printf "%s: gpu.count %d with runner.device cpu, which would leave it idle; expected cuda" $where (int $set.gpu.count)) -}}
{{- end -}}
{{- if and (eq $set.runner.device "cuda") (has $set.runner.dtype (list "int8" "int4")) -}}
{{- fail (printf "%s: runner.dtype %s on cuda; expected float32 or bfloat16" $where $set.runner.dtype) -}}
{{- end -}}
{{- if and $set.runner.servePeers (ne .root.Values.discovery.type "static") (not .root.Values.config.pools) -}}
{{- fail (printf "%s: runner.servePeers with discovery.type %s: peers are known by their names, and the gateway would name addresses; expected static" $where .root.Values.discovery.type) -}}
{{- end -}}
{{- if and (hasPrefix "/models/" $set.model) (not $set.modelVolume) -}}
{{- fail (printf "%s: model %s, but modelVolume is empty; expected the volume that holds it" $where $set.model) -}}
{{- end -}}
{{- end -}}
{{- if and $set.modelVolumeReadOnly (not $set.modelVolume) -}}
{{- fail (printf "%s: modelVolumeReadOnly without a modelVolume: nothing could get there" $where) -}}
{{- end -}}
{{- $ports := list (int $set.port) -}}
{{- if $set.kvEvents.enabled -}}
{{- $ports = concat $ports (list (int $set.kvEvents.port) (int $set.kvEvents.replayPort)) -}}
{{- end -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- fail (printf "%s: port, kvEvents.port and kvEvents.replayPort have to differ, got %s" $where (join ", " $ports)) -}}
{{- end -}}
{{- if and (include "warmlane.autoscaled" (dict "root" .root "where" $where "part" $set)) (eq .root.Values.discovery.type "static") (not .root.Values.config.pools) -}}
{{- fail (printf "%s: autoscaling with discovery.type static: the gateway would not see new pods; expected kubernetes or dns" $where) -}}
{{- end -}}
{{- end -}}

{{/* Selector that picks a set's pods, as a text (root, component). */}}
{{- define "warmlane.podSelector" -}}
{{- printf "app.kubernetes.io/instance=%s,app.kubernetes.io/component=%s" .root.Release.Name .component -}}
{{- end -}}

{{/* A set's pool in the gateway's configuration, as JSON (root, set). */}}
{{- define "warmlane.pool" -}}
{{- $set := .set -}}
{{- $type := .root.Values.discovery.type -}}
{{- $pool := dict "name" $set.name "models" (list $set.served) "engine" $set.type -}}
{{- with $set.tokenizer -}}{{- $_ := set $pool "tokenizer" . -}}{{- end -}}
{{- $events := $set.kvEvents -}}
{{- if eq $type "static" -}}
{{- $workers := list -}}
{{- range $i := until (int $set.replicas) -}}
{{- $host := printf "%s-%d.%s" $set.full $i $set.full -}}
{{- $worker := dict "id" (printf "%s-%d" $set.full $i) "url" (printf "http://%s:%d" $host (int $set.port)) -}}
{{- $_ := set $worker "kv_events" (list) -}}
{{- if $events.enabled -}}
{{- $_ := set $worker "kv_events" (printf "tcp://%s:%d" $host (int $events.port)) -}}
{{- $_ := set $worker "kv_replay" (printf "tcp://%s:%d" $host (int $events.replayPort)) -}}
{{- end -}}
{{- $workers = append $workers $worker -}}
{{- end -}}
{{- $_ := set $pool "workers" $workers -}}
{{- else -}}
{{- $discovery := dict "type" $type "port" (int $set.port) -}}
{{- if eq $type "dns" -}}
{{- $_ := set $discovery "name" (printf "%s.%s.svc" $set.full .root.Release.Namespace) -}}
{{- else -}}
{{- $_ := set $discovery "selector" (include "warmlane.podSelector" (dict "root" .root "component" $set.component)) -}}
{{- end -}}
{{- if $events.enabled -}}
{{- $_ := set $discovery "kv_events" (printf "tcp://{ip}:%d" (int $events.port)) -}}
{{- $_ := set $discovery "kv_replay" (printf "tcp://{ip}:%d" (int $events.replayPort)) -}}
{{- end -}}
{{- $_ := set $pool "discovery" $discovery -}}
{{- end -}}
{{ mergeOverwrite $pool (deepCopy $set.pool) | toJson }}
{{- end -}}

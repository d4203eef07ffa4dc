{{/* "true" where a pod gets the demo model's weights itself (a set). */}}
{{- define "warmlane.fetchesWeights" -}}
{{- if and (eq .type "runner") (eq .model "smollm2") (not .modelVolume) -}}true{{- end -}}
{{- end -}}

{{/* Size of /dev/shm, or nothing (a set). Tensor-parallel vLLM speaks with itself through it. */}}
{{- define "warmlane.sharedMemory" -}}
{{- default (ternary "8Gi" "" (eq .type "vllm")) .sharedMemory -}}
{{- end -}}

{{- define "warmlane.engineResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpu.count) 0 -}}
{{- $limits := default dict $resources.limits -}}
{{- $_ := set $limits .gpu.resource (int .gpu.count) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* Arguments of the bundled engine (root, set). */}}
{{- define "warmlane.runnerArgs" -}}
{{- $set := .set -}}
{{- $runner := $set.runner -}}
{{- $args := list "runner" "--model" $set.model "--served-model-name" $set.served -}}
{{- $args = concat $args (list "--host" "0.0.0.0" "--port" ($set.port | toString)) -}}
{{- $args = concat $args (list "--dtype" $runner.dtype "--device" $runner.device) -}}
{{- $args = concat $args (list "--threads" ($runner.threads | toString)) -}}
{{- with $runner.poolTokens -}}{{- $args = concat $args (list "--pool-tokens" (. | toString)) -}}{{- end -}}
{{- if $set.kvEvents.enabled -}}
{{- $args = concat $args (list "--kv-events" (printf "tcp://0.0.0.0:%d" (int $set.kvEvents.port))) -}}
{{- $args = concat $args (list "--kv-replay" (printf "tcp://0.0.0.0:%d" (int $set.kvEvents.replayPort))) -}}
{{- end -}}
{{- with $runner.hostBytes -}}{{- $args = concat $args (list "--host-bytes" (. | toString)) -}}{{- end -}}
{{- with $runner.ssdBytes -}}{{- $args = concat $args (list "--ssd-dir" "/cache" "--ssd-bytes" (. | toString)) -}}{{- end -}}
{{- if $runner.servePeers -}}
{{- $args = append $args "--serve-peers" -}}
{{- range $i := until (int $set.most) -}}
{{- $args = concat $args (list "--peer" (printf "http://%s-%d.%s:%d" $set.full $i $set.full (int $set.port))) -}}
{{- end -}}
{{- end -}}
{{- include "warmlane.args" $args -}}
{{- end -}}

{{/* Arguments of vLLM (root, set). */}}
{{- define "warmlane.vllmArgs" -}}
{{- $set := .set -}}
{{- $args := list $set.model "--served-model-name" $set.served -}}
{{- $args = concat $args (list "--host" "0.0.0.0" "--port" ($set.port | toString)) -}}
{{- $args = concat $args (list "--enable-prefix-caching" "--enable-prompt-tokens-details") -}}
{{- if and $set.kvEvents.enabled (not (has "--kv-events-config" $set.extraArgs)) -}}
{{- $events := dict "enable_kv_cache_events" true "publisher" "zmq" "topic" "kv-events" -}}
{{- $_ := set $events "endpoint" (printf "tcp://*:%d" (int $set.kvEvents.port)) -}}
{{- $_ := set $events "replay_endpoint" (printf "tcp://*:%d" (int $set.kvEvents.replayPort)) -}}
{{- $args = concat $args (list "--kv-events-config" (toJson $events)) -}}
{{- end -}}
{{- include "warmlane.args" $args -}}
{{- end -}}

{{/* Variables of an engine (root, set). A user's own come before the chart's. */}}
{{- define "warmlane.engineEnv" -}}
{{- $set := .set -}}
{{- /* The root file system is read-only; caches of compilers go to /tmp, and a user id without a
       name needs one for torch. */ -}}
{{- $env := dict "HOME" "/tmp" "USER" "warmlane" "XDG_CACHE_HOME" "/tmp/.cache" "TRITON_CACHE_DIR" "/tmp/.cache/triton" -}}
{{- if eq $set.type "vllm" -}}
{{- $_ := set $env "HF_HOME" "/models" -}}
{{- $_ := set $env "XDG_CONFIG_HOME" "/tmp/.config" -}}
{{- $_ := set $env "VLLM_CACHE_ROOT" "/tmp/.cache/vllm" -}}
{{- else -}}
{{- $_ := set $env "WARMLANE_MODELS_DIR" "/models" -}}
{{- end -}}
{{- include "warmlane.secretEnv" (dict "root" .root "where" "secrets.hfToken" "name" "HF_TOKEN") }}
{{- include "warmlane.env" (dict "env" (mergeOverwrite $env (deepCopy $set.env)) "extraEnv" $set.extraEnv) }}
{{- end -}}

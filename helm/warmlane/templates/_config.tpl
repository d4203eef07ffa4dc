{{/* The gateway's whole configuration, as JSON: config and what the chart's other values say. */}}
{{- define "warmlane.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $server := default dict $config.server -}}
{{- $_ := set $config "server" $server -}}
{{- $sets := fromJsonArray (include "warmlane.sets" .) -}}
{{- if not $config.pools -}}
{{- if not $sets -}}
{{- fail "there are no workers: expected worker sets of this chart (workers) or config.pools, which says where yours are" -}}
{{- end -}}
{{- $pools := list -}}
{{- range $sets -}}
{{- $pools = append $pools (fromJson (include "warmlane.pool" (dict "root" $ "set" .))) -}}
{{- end -}}
{{- $_ := set $config "pools" $pools -}}
{{- end -}}
{{- include "warmlane.addIndex" (dict "root" . "config" $config) -}}
{{- if include "warmlane.secretAt" (dict "root" . "where" "secrets.adminToken") -}}
{{- $access := default dict $server.access -}}
{{- $_ := set $server "access" $access -}}
{{- $_ := set $access "admin_token_env" (default "WARMLANE_ADMIN_TOKEN" $access.admin_token_env) -}}
{{- end -}}
{{- if include "warmlane.secretAt" (dict "root" . "where" "secrets.salt") -}}
{{- $security := default dict $config.security -}}
{{- $_ := set $config "security" $security -}}
{{- $_ := set $security "salt_secret_env" (default "WARMLANE_SALT_SECRET" $security.salt_secret_env) -}}
{{- end -}}
{{- if .Values.secrets.tls.existingSecret -}}
{{- if (default dict $server.tls).cert -}}
{{- fail "secrets.tls and config.server.tls are both set; expected one of them" -}}
{{- end -}}
{{- $_ := set $server "tls" (dict "cert" "/var/run/warmlane/tls/tls.crt" "key" "/var/run/warmlane/tls/tls.key") -}}
{{- end -}}
{{- include "warmlane.checkConfig" (dict "root" . "config" $config) -}}
{{ toJson $config }}
{{- end -}}

{{/* Where the shared index is (root, config); changes config. */}}
{{- define "warmlane.addIndex" -}}
{{- $config := .config -}}
{{- $index := default dict $config.index -}}
{{- $fromSecret := include "warmlane.secretAt" (dict "root" .root "where" "secrets.redisUrl") -}}
{{- if and .root.Values.valkey.enabled (or $index.url $fromSecret) -}}
{{- fail "valkey.enabled with another Redis (config.index.url or secrets.redisUrl); expected one of them" -}}
{{- end -}}
{{- if and $fromSecret $index.url -}}
{{- fail "secrets.redisUrl and config.index.url are both set; expected one of them" -}}
{{- end -}}
{{- if or .root.Values.valkey.enabled $fromSecret -}}
{{- if eq (default "redis" $index.backend) "memory" -}}
{{- fail "config.index.backend is memory, but valkey.enabled or secrets.redisUrl names a Redis; expected redis or nothing" -}}
{{- end -}}
{{- $_ := set $index "backend" "redis" -}}
{{- $_ := set $config "index" $index -}}
{{- end -}}
{{- if .root.Values.valkey.enabled -}}
{{- $_ := set $index "url" (printf "redis://%s:6379/0" (include "warmlane.name" (dict "root" .root "part" "valkey"))) -}}
{{- end -}}
{{- if and (eq (default "memory" $index.backend) "redis") (not $index.url) (not $fromSecret) -}}
{{- fail "config.index.backend is redis without a server; expected valkey.enabled, secrets.redisUrl or config.index.url" -}}
{{- end -}}
{{- end -}}

{{/* Refuses a configuration that cannot work in pods (root, config). What it says for itself the
     gateway checks; `warmlane config check` does so beforehand. */}}
{{- define "warmlane.checkConfig" -}}
{{- $root := .root -}}
{{- $server := .config.server -}}
{{- $backend := default "memory" (default dict .config.index).backend -}}
{{- $gateway := $root.Values.gateway -}}
{{- $bounds := fromJson (include "warmlane.bounds" (dict "root" $root "where" "gateway" "part" $gateway)) -}}
{{- if and (gt (int $bounds.most) 1) (ne $backend "redis") -}}
{{- fail (printf "up to %d gateways with an index in memory would route past each other; expected valkey.enabled, secrets.redisUrl or config.index.url with config.index.backend redis, or one replica" (int $bounds.most)) -}}
{{- end -}}
{{- if and (gt (int (default 1 $server.processes)) 1) (ne $backend "redis") -}}
{{- fail (printf "config.server.processes %d need a shared index; expected valkey.enabled or another Redis, or one process" (int $server.processes)) -}}
{{- end -}}
{{- if has (default "0.0.0.0" $server.host) (list "127.0.0.1" "localhost" "::1") -}}
{{- fail (printf "config.server.host %s cannot be reached from outside the pod; expected 0.0.0.0 or ::" $server.host) -}}
{{- end -}}
{{- range $key := list "port" "admin_port" -}}
{{- if and (hasKey $server $key) (not (kindIs "invalid" (get $server $key))) (lt (int (get $server $key)) 1) -}}
{{- fail (printf "config.server.%s is 0, which would be another one after each start; expected a fixed port" $key) -}}
{{- end -}}
{{- end -}}
{{- if eq (int (default 8080 $server.port)) (int (default 0 $server.admin_port)) -}}
{{- fail (printf "config.server.port and admin_port are both %d; expected two ports" (int $server.admin_port)) -}}
{{- end -}}
{{- include "warmlane.checkVariables" . -}}
{{- include "warmlane.checkKeyFiles" . -}}
{{- end -}}

{{/* Refuses names of variables that no pod of the gateway has (root, config). */}}
{{- define "warmlane.checkVariables" -}}
{{- $gateway := .root.Values.gateway -}}
{{- $known := concat (keys $gateway.env) (keys .root.Values.secrets.env) -}}
{{- range $gateway.extraEnv -}}{{- $known = append $known .name -}}{{- end -}}
{{- if ne (len $known) (len (uniq $known)) -}}
{{- fail (printf "a variable stands twice in secrets.env, gateway.env and gateway.extraEnv: %s; expected names that differ" (sortAlpha $known | join ", ")) -}}
{{- end -}}
{{- if include "warmlane.secretAt" (dict "root" .root "where" "secrets.adminToken") -}}{{- $known = append $known (default dict .config.server.access).admin_token_env -}}{{- end -}}
{{- if include "warmlane.secretAt" (dict "root" .root "where" "secrets.salt") -}}{{- $known = append $known .config.security.salt_secret_env -}}{{- end -}}
{{- $asked := dict -}}
{{- with (default dict .config.server.access).admin_token_env -}}{{- $_ := set $asked "config.server.access.admin_token_env" . -}}{{- end -}}
{{- with (default dict .config.security).salt_secret_env -}}{{- $_ := set $asked "config.security.salt_secret_env" . -}}{{- end -}}
{{- range .config.tenants -}}
{{- if .key_env -}}{{- $_ := set $asked (printf "config.tenants (%s).key_env" .name) .key_env -}}{{- end -}}
{{- end -}}
{{- range .config.pools -}}
{{- if .api_key_env -}}{{- $_ := set $asked (printf "config.pools (%s).api_key_env" .name) .api_key_env -}}{{- end -}}
{{- end -}}
{{- range $where, $name := $asked -}}
{{- if and (not (has $name $known)) (not $gateway.envFrom) -}}
{{- fail (printf "%s names the variable %s, which no pod would have; expected it in secrets.env, gateway.env, gateway.extraEnv or gateway.envFrom" $where $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses tenants' key files that are not mounted (root, config). */}}
{{- define "warmlane.checkKeyFiles" -}}
{{- $folder := "/var/run/warmlane/keys/" -}}
{{- range .config.tenants -}}
{{- $path := default "" .keys_file -}}
{{- if and (hasPrefix $folder $path) (not (hasKey $.root.Values.secrets.keyFiles (trimPrefix $folder $path))) -}}
{{- fail (printf "config.tenants (%s).keys_file is %s; expected %s in secrets.keyFiles" .name $path (trimPrefix $folder $path)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether clients speak TLS: "https" or "http" (a configuration). */}}
{{- define "warmlane.scheme" -}}
{{- ternary "https" "http" (not (not (default dict .server.tls).cert)) -}}
{{- end -}}

{{/* Whether operators speak TLS (a configuration); their port, if they have one, need not. */}}
{{- define "warmlane.adminScheme" -}}
{{- if .server.admin_port -}}
{{- ternary "https" "http" (eq true .server.admin_tls) -}}
{{- else -}}
{{- include "warmlane.scheme" . -}}
{{- end -}}
{{- end -}}

{{/* Namespaces and kinds that the gateway watches, as {namespace: {pods, endpointslices}} (root,
     config). Pools with a kubeconfig bring their own rights. */}}
{{- define "warmlane.watched" -}}
{{- $watched := dict -}}
{{- range .config.pools -}}
{{- $discovery := default dict .discovery -}}
{{- if and (eq (default "static" $discovery.type) "kubernetes") (not $discovery.kubeconfig) -}}
{{- $namespace := default $.root.Release.Namespace $discovery.namespace -}}
{{- $kinds := default dict (get $watched $namespace) -}}
{{- $_ := set $kinds (ternary "endpointslices" "pods" (not (not $discovery.service))) true -}}
{{- $_ := set $watched $namespace $kinds -}}
{{- end -}}
{{- end -}}
{{ toJson $watched }}
{{- end -}}

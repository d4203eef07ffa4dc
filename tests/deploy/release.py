"""A chart's release on a site: its pods with their volumes, variables, names and probes."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.discovery.kube_access import SERVICE_ACCOUNT
from tests.deploy import chart_parts
from tests.deploy.chart_parts import Object
from tests.deploy.images import Image
from tests.deploy.site import Container, Mount, Site, Spec, volume

NAMESPACE = "llm"

Secrets = Mapping[tuple[str, str], str]


@dataclass
class Release:
    """What a values file renders to, and where it runs.

    Attributes:
        objects: All of them.
        images: Repository of an image -> what stands for it here.
        secrets: (name, key) -> value of the Secrets that the values only name.
        folder: For volumes.
        volumes: Path in a container -> what is there instead of its volume.
        kernels: Where runners keep what they compile.
        service_account: What pods get that may ask the API.
    """

    site: Site
    objects: list[Object]
    images: Mapping[str, Image]
    folder: Path
    secrets: dict[tuple[str, str], str] = field(default_factory=dict)
    volumes: Mapping[str, Path] = field(default_factory=dict)
    kernels: Path | None = None
    service_account: Path | None = None
    _addresses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for secret in chart_parts.of_kind(self.objects, "Secret"):
            name = secret["metadata"]["name"]
            plain = {key: _decoded(text) for key, text in secret.get("data", {}).items()}
            for key, text in {**plain, **secret.get("stringData", {})}.items():
                self.secrets[name, key] = text

    def start(self, owner: Object, replicas: int | None = None) -> list[Container]:
        """Start an object's pods, each once its init containers succeeded."""
        wanted = owner["spec"].get("replicas", 1) if replicas is None else replicas
        return [self._start_pod(owner, ordinal) for ordinal in range(wanted)]

    def name_pods(self, owner: Object, addresses: Sequence[str] = ()) -> None:
        """Give an object's pods their names, before anything asks for them.

        Args:
            owner: Has the pods.
            addresses: Of pods that run already; none = new ones.
        """
        labels = chart_parts.pod_of(owner)["metadata"]["labels"]
        services = [
            service["metadata"]["name"]
            for service in chart_parts.of_kind(self.objects, "Service")
            if service["spec"]["selector"].items() <= labels.items()
        ]
        for ordinal in range(len(addresses) or owner["spec"]["replicas"]):
            own = self.pod_name(owner, ordinal)
            names = [full for service in services for full in _qualified(service)]
            if owner["kind"] == "StatefulSet":
                names += _qualified(f"{own}.{owner['spec']['serviceName']}")
            given = addresses[ordinal] if addresses else None
            self._addresses[own] = self.site.name(own, *names, address=given)

    def pod_name(self, owner: Object, ordinal: int) -> str:
        """Return a pod's name."""
        return f"{owner['metadata']['name']}-{ordinal}"

    def wait_ready(
        self, container: Container, owner: Object, probe: str = "readinessProbe"
    ) -> None:
        """Wait until a probe that the container of an object has succeeds on a started one."""
        (described,) = chart_parts.containers(owner, init=False)
        said = described[probe]
        how = said.get("httpGet") or said["tcpSocket"]
        ports = {port["name"]: port["containerPort"] for port in described["ports"]}
        port = ports.get(how["port"], how["port"])
        scheme = how.get("scheme", "HTTP").lower() if "httpGet" in said else "tcp"
        url = f"{scheme}://{container.address}:{port}{how.get('path', '')}"
        self.site.wait_reachable(container, url)

    def _start_pod(self, owner: Object, ordinal: int) -> Container:
        own = self.pod_name(owner, ordinal)
        pod = chart_parts.pod_of(owner)["spec"]
        folder = self.folder / own
        volumes = {one["name"]: one for one in pod.get("volumes", ())}
        address = self._addresses.get(own)
        for init in pod.get("initContainers", ()):
            done = self.site.start(self._spec(f"{own}-{init['name']}", init, pod, volumes, folder))
            assert done.wait() == 0, done.output
        (container,) = pod["containers"]
        return self.site.start(self._spec(own, container, pod, volumes, folder), address)

    def _spec(
        self, name: str, container: Object, pod: Object, volumes: Mapping[str, Object], folder: Path
    ) -> Spec:
        env = self._environment(container)
        security = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        assert security["runAsNonRoot"]
        assert security["capabilities"]["drop"] == ["ALL"]
        return Spec(
            names=(name,),
            image=self.images[container["image"].rpartition(":")[0]],
            args=_expanded(container.get("args"), env),
            entrypoint=_expanded(container.get("command"), env),
            env=env,
            user=f"{security['runAsUser']}:{security['runAsGroup']}",
            mounts=tuple(self._mounts(container, pod, volumes, folder)),
            read_only=security["readOnlyRootFilesystem"],
        )

    def _environment(self, container: Object) -> dict[str, str]:
        known = [
            {"name": item["name"], "value": "node-0"}
            if "fieldRef" in item.get("valueFrom", {})
            else item
            for item in container.get("env", ())
        ]
        found = chart_parts.environment({"env": known}, self.secrets)
        # Nobody answers there: its API is not part of a site.
        return {"KUBERNETES_SERVICE_HOST": "10.77.255.1", "KUBERNETES_SERVICE_PORT": "443", **found}

    def _mounts(
        self, container: Object, pod: Object, volumes: Mapping[str, Object], folder: Path
    ) -> Iterator[Mount]:
        for mount in container.get("volumeMounts", ()):
            target, described = mount["mountPath"], volumes[mount["name"]]
            source = self.volumes.get(target) or folder / mount["name"]
            if not source.exists():
                self._fill(volume(source), described, pod["securityContext"]["fsGroup"])
            given = any(kind in described for kind in ("configMap", "secret", "projected"))
            yield Mount(source, target, read_only=given or mount.get("readOnly", False))
        # What is compiled once is not compiled again, as on a volume that is kept.
        place = self._environment(container).get("XDG_CACHE_HOME")
        if place is not None and self.kernels is not None:
            yield Mount(self.kernels, place, read_only=False)

        if pod["automountServiceAccountToken"]:
            assert self.service_account is not None
            yield Mount(self.service_account, str(SERVICE_ACCOUNT))

    def _fill(self, folder: Path, described: Object, group: int) -> None:
        """Write files as the kubelet does: root's, and readable by the pod's group."""
        projected = described.get("projected")
        (kind,) = (key for key in described if key != "name")
        mode = (described[kind] or {}).get("defaultMode", 0o644)
        for source in projected["sources"] if projected else (described,):
            for path, text in self._files(source):
                (folder / path).write_text(text)
                os.chown(folder / path, 0, group)
                (folder / path).chmod(mode)

    def _files(self, source: Object) -> Iterator[tuple[str, str]]:
        """Yield what a ConfigMap or Secret puts into a volume; other kinds begin empty."""
        data: dict[str, str] = {}
        said: Object = source.get("configMap") or source.get("secret") or {}
        if "configMap" in source:
            (found,) = (
                one
                for one in chart_parts.of_kind(self.objects, "ConfigMap")
                if one["metadata"]["name"] == said["name"]
            )
            data = found["data"]
        elif "secret" in source:
            name = said.get("secretName") or said["name"]
            data = {key: text for (owner, key), text in self.secrets.items() if owner == name}
            assert data, f"nobody made the Secret {name}"
        items = said.get("items") or [{"key": key, "path": key} for key in data]
        yield from ((item["path"], data[item["key"]]) for item in items)


def _qualified(name: str) -> list[str]:
    """Return the names under which a cluster's DNS knows a service or a pod of one."""
    ends = ("", f".{NAMESPACE}", f".{NAMESPACE}.svc", f".{NAMESPACE}.svc.cluster.local")
    return [name + end for end in ends]


def _expanded(words: list[str] | None, env: Mapping[str, str]) -> list[str] | None:
    """Replace $(NAME) as the kubelet does; $$(NAME) stays $(NAME)."""
    if words is None:
        return None

    def value(match: re.Match[str]) -> str:
        return match[0][1:] if match[0].startswith("$$") else env.get(match[1], match[0])

    return [re.sub(r"\$?\$\((\w+)\)", value, word) for word in words]


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()

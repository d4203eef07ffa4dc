"""Containers without a container engine: what a pod or a compose service starts, started here.

Each has a network interface, a read-only root with this machine's files but not the repository, the
image's user without capabilities, its own mounts, and names of the others in ``/etc/hosts``. Needs
root, namespaces, overlayfs and iproute2; tests skip where the machine lacks them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
import pytest

from tests.deploy.images import REPOSITORY, Image
from tests.deploy.namespaces import descendants, enter, own_ids
from tests.tools import tool

T = TypeVar("T")

# Interpreter, libraries and weights are read from a disk that others use too.
READY_DEADLINE_S = 180.0

_INIT = Path(__file__).with_name("container_init.py")
_interfaces = itertools.count(1)


@dataclass(frozen=True)
class Mount:
    """One folder or file of this machine that a container sees."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Spec:
    """What to start.

    Attributes:
        names: Under which the others find it.
        args: As Kubernetes and compose have them; None = the image's.
        entrypoint: Instead of the image's.
    """

    names: tuple[str, ...]
    image: Image
    args: list[str] | None = None
    entrypoint: list[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    mounts: tuple[Mount, ...] = ()
    read_only: bool = True

    @property
    def argv(self) -> list[str]:
        """The whole command line."""
        if self.entrypoint is not None:
            return [*self.entrypoint, *(self.args or ())]
        args = self.image.command if self.args is None else self.args
        return [*self.image.entrypoint, *args]


@dataclass
class Container:
    """A started one."""

    spec: Spec
    address: str
    log: Path
    about: Path
    process: subprocess.Popen[bytes]

    def wait(self, *, deadline_s: float = READY_DEADLINE_S) -> int:
        """Return its exit status."""
        return self.process.wait(deadline_s)

    def program(self) -> int:
        """Return the process id of its program, as soon as there is one.

        It is the only one two process namespaces below this one's: what makes them is above.
        """
        end = time.monotonic() + READY_DEADLINE_S
        while True:
            for pid in descendants(self.process.pid):
                if len(own_ids(pid)) == len(own_ids(os.getpid())) + 2:
                    return pid
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, "it never began"
            time.sleep(0.02)

    def terminate(self) -> int:
        """Tell its program to end, and return its exit status once it did."""
        os.kill(self.program(), signal.SIGTERM)
        return self.wait()

    @property
    def output(self) -> str:
        """What it wrote, the last of it."""
        return self.log.read_text(errors="replace")[-4000:]


class Site:
    """A network of containers; usable as a context manager, which ends them all.

    Args:
        folder: For logs and roots.
    """

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("containers need root here")
        for program in ("unshare", "nsenter", "setpriv", "ip"):
            tool(program)
        if subprocess.run(["unshare", "--mount", "--net", "true"], check=False).returncode:
            pytest.skip("this machine gives no namespaces")
        self._folder = folder
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._addresses = (f"10.77.0.{number}" for number in range(2, 255))
        self.containers: list[Container] = []

    def __enter__(self) -> Self:
        bridge = (
            "ip link set lo up && ip link add site0 type bridge && ip link set site0 up && "
            "ip addr add 10.77.0.1/16 dev site0 && echo up && exec sleep infinity"
        )
        self._network = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", bridge], stdout=subprocess.PIPE
        )
        assert self._network.stdout is not None
        assert self._network.stdout.readline() == b"up\n", "no bridge"
        self.namespace = f"/proc/{self._network.pid}/ns/net"
        self._threads = ThreadPoolExecutor(1, initializer=enter, initargs=(self.namespace,))
        return self

    def __exit__(self, *exception: object) -> None:
        for container in self.containers:
            self.stop(container)
        self._threads.shutdown()
        self._network.kill()
        self._network.communicate()

    def name(self, *names: str, address: str | None = None) -> str:
        """Give names to an address, a new one if there is none yet; return it."""
        address = address or next(self._addresses)
        with self._hosts.open("a") as hosts:
            hosts.write(f"{address} {' '.join(names)}\n")
        return address

    def start(self, spec: Spec, address: str | None = None) -> Container:
        """Start a container."""
        address = address or self.name(*spec.names)
        number = next(_interfaces)
        work = self._folder / f"{number}-{spec.names[0]}"
        work.mkdir()
        mounts = [
            *(Mount(source, target) for target, source in spec.image.binds.items()),
            Mount(self._hosts, "/etc/hosts"),
            *spec.mounts,
        ]
        told = {
            "interface": f"site-{number}",
            "address": address,
            "bridge_namespace": self.namespace,
            "work": str(work),
            "hidden": str(REPOSITORY),
            "kept": sys.prefix,
            "readable": sys.base_prefix,
            "mounts": [(mount.target, str(mount.source), mount.read_only) for mount in mounts],
            "read_only": spec.read_only,
            "user": spec.user or spec.image.user,
            "argv": spec.argv,
            "env": {"PATH": "/usr/local/bin:/usr/bin:/bin", **spec.image.env, **spec.env},
        }
        about = self._folder / f"{work.name}.json"
        about.write_text(json.dumps(told))
        log = self._folder / f"{work.name}.log"
        alone = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        command = [*alone, "--propagation", "private", sys.executable, "-I", str(_INIT), str(about)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        container = Container(spec, address, log, about, process)
        self.containers.append(container)
        return container

    def stop(self, container: Container) -> None:
        """Kill it with everything in it."""
        container.process.kill()
        container.process.wait()

    def run(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        """Call something on the site's network, as a node or a user would."""
        return self._threads.submit(call, *args, **named).result()

    def get(self, url: str, **named: Any) -> httpx.Response:
        """Fetch a URL from the site's network; names of containers are not known there."""
        return self.run(httpx.get, url, timeout=5, **named)

    def execute(self, container: Container, argv: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as the container's user and in its environment."""
        told = json.loads(container.about.read_text())
        pid = str(container.program())
        uid, _, gid = told["user"].partition(":")
        confined = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *argv]
        return subprocess.run(
            [
                *("/usr/bin/nsenter", "--target", pid, "--mount", "--net", "--pid"),
                *(str(shutil.which("chroot")), f"{told['work']}/root", *confined),
            ],
            env=told["env"],
            capture_output=True,
            text=True,
            check=False,
        )

    def wait_until_healthy(self, container: Container, argv: list[str]) -> None:
        """Run a health check inside until it succeeds."""
        end = time.monotonic() + READY_DEADLINE_S
        while (done := self.execute(container, argv)).returncode:
            assert container.process.poll() is None, container.output
            assert time.monotonic() < end, f"{done.stderr}\n{container.output}"
            time.sleep(0.2)

    def wait_reachable(self, container: Container, url: str) -> None:
        """Poll a probe's URL until it succeeds: 2xx or 3xx for http, a connection for tcp.

        Certificates are not looked at, as the kubelet does not.
        """
        end = time.monotonic() + READY_DEADLINE_S
        while not (answered := self.run(_answered, url)).startswith(("tcp", "2", "3")):
            assert container.process.poll() is None, container.output
            assert time.monotonic() < end, f"{url}: {answered}\n{container.output}"
            time.sleep(0.1)


def volume(folder: Path) -> Path:
    """Return a fresh folder that any user may write, as an empty volume is."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    return folder


def _answered(url: str) -> str:
    parts = urlsplit(url)
    try:
        if parts.scheme == "tcp":
            with socket.create_connection((parts.hostname, parts.port), timeout=2):
                return "tcp"
        return str(httpx.get(url, timeout=5, verify=False).status_code)  # noqa: S501
    except (OSError, httpx.TransportError) as error:
        return str(error) or type(error).__name__

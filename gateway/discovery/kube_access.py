"""How the Kubernetes API is reached: by the pod's service account, or by a kubeconfig.

Source: the files that Kubernetes puts into each pod, and the kubeconfig format (``v1 Config``).
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class AccessError(Exception):
    """The API cannot be reached as configured; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API is and how to log in.

    Attributes:
        url: Base URL, without a trailing slash.
        namespace: The one that belongs to these credentials.
        ssl: Context for https; None for http.
        token: Fixed token; empty = none.
        token_file: Where the token stands that is valid now; the kubelet renews it. None = nowhere.
    """

    url: str
    namespace: str
    ssl: ssl.SSLContext | None = None
    token: str = ""
    token_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """Return what is sent with a request; reads the token file.

        Raises:
            AccessError: If the token file cannot be read.
        """
        token = self.token
        if self.token_file is not None:
            token = _read(self.token_file).strip()
        return {"authorization": f"Bearer {token}"} if token else {}


def in_cluster(environ: Mapping[str, str] | None = None, folder: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access that a pod has.

    Raises:
        AccessError: If this is no pod, or it was given no service account.
    """
    environ = os.environ if environ is None else environ
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise AccessError(
            "expected to run in a cluster (KUBERNETES_SERVICE_HOST is not set); outside, set "
            "discovery.kubeconfig"
        )
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except OSError as error:
        raise AccessError(
            f"{folder / 'ca.crt'}: expected the cluster's authority: {error}; does the pod have "
            "automountServiceAccountToken?"
        ) from error
    access = Access(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        _read(folder / "namespace").strip(),
        context,
        token_file=folder / "token",
    )
    access.headers()
    return access


def from_kubeconfig(path: str, context: str | None = None) -> Access:
    """Return the access that a kubeconfig's context has.

    Args:
        path: The file.
        context: Name of the context; None = the file's current one.

    Raises:
        AccessError: If it cannot be read or used; ``exec`` and ``auth-provider`` cannot.
    """
    try:
        config = yaml.safe_load(_read(Path(path)))
        name = context or config["current-context"]
        chosen = _named(config["contexts"], name, "context")
        cluster = _named(config["clusters"], chosen["cluster"], "cluster")
        user = _named(config["users"], chosen["user"], "user") if chosen.get("user") else {}
        folder = Path(path).parent
        return Access(
            str(cluster["server"]).rstrip("/"),
            chosen.get("namespace") or "default",
            _context(cluster, user, folder),
            *_token(user, folder),
        )
    except (yaml.YAMLError, KeyError, TypeError, ValueError, OSError) as error:
        raise AccessError(f"{path}: expected a kubeconfig: {_text(error)}") from error
    except AccessError as error:
        raise AccessError(f"{path}: {error}") from error


def _token(user: dict[str, Any], folder: Path) -> tuple[str, Path | None]:
    for way in ("exec", "auth-provider"):
        if way in user:
            raise AccessError(
                f"{way} is not supported: expected a token, tokenFile or client-certificate "
                "(programs are not run by the gateway)"
            )
    if "username" in user:
        raise AccessError("username and password are not supported by Kubernetes any more")
    if user.get("tokenFile"):
        return "", folder / user["tokenFile"]
    return str(user.get("token") or ""), None


def _context(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> ssl.SSLContext | None:
    if not str(cluster["server"]).startswith("https://"):
        return None
    authority = _data(cluster, "certificate-authority", folder)
    context = ssl.create_default_context(cadata=None if authority is None else authority.decode())
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    cert, key = (_data(user, name, folder) for name in ("client-certificate", "client-key"))
    if cert is not None and key is not None:
        # Python loads them from a file only; it is gone when this returns.
        with NamedTemporaryFile() as both:
            both.write(cert + b"\n" + key)
            both.flush()
            context.load_cert_chain(both.name)
    return context


def _data(section: dict[str, Any], name: str, folder: Path) -> bytes | None:
    """Return what stands in ``NAME-data``, or in the file that ``NAME`` names."""
    if section.get(f"{name}-data"):
        try:
            return base64.b64decode(section[f"{name}-data"], validate=True)
        except binascii.Error as error:
            raise AccessError(f"{name}-data: expected base64: {error}") from error
    return (folder / section[name]).read_bytes() if section.get(name) else None


def _named(items: Any, name: str, what: str) -> dict[str, Any]:
    for item in items:
        if item["name"] == name:
            found: dict[str, Any] = item.get(what) or {}
            return found
    raise AccessError(f"there is no {what} {name!r}")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"{path}: cannot be read: {error}") from error


def _text(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)

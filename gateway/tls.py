"""TLS on both sides: the client port's certificate, and who a worker must prove to be.

Nothing here ever falls back to plain text or to an unverified peer.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from functools import lru_cache

import structlog

log = structlog.get_logger("warmlane")

# Certificates are renewed days before they end; looking costs two system calls.
RELOAD_CHECK_S = 5.0
_ALPN = ["http/1.1"]

Stamp = tuple[tuple[int, int, int], ...]


class TlsError(Exception):
    """A certificate, key or CA file cannot be used; the message names it."""


@lru_cache(maxsize=64)
def worker_context(ca: str | None = None) -> ssl.SSLContext:
    """Return the context with which ``https`` workers are verified; one per CA file.

    Args:
        ca: PEM file of the authorities that may sign them; None takes the system's.

    Raises:
        TlsError: If the file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise TlsError(f"{ca}: expected a PEM file of CA certificates: {_reason(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    return context


class ServerTls:
    """The client port's certificate, taken up again when its files change.

    Connections keep the certificate they began with; each new one gets the newest. A pair that
    cannot be used is left alone until the files change again.

    Args:
        cert: PEM file with the certificate and its chain.
        key: PEM file with its key, not encrypted.

    Attributes:
        context: To listen with.

    Raises:
        TlsError: If they cannot be used.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._files = cert, key
        self._stamp = self._look()
        self._current = self._load()
        self.context = self._load()
        # A context that is in use cannot be changed in one step: another one takes its place while
        # a connection says hello.
        self.context.sni_callback = self._take_current

    async def run(self, every_s: float = RELOAD_CHECK_S) -> None:
        """Look at the files every ``every_s`` seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.reload()

    def reload(self) -> None:
        """Take the files up again if they have changed."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            current = self._load()
        except TlsError as error:
            log.error("certificate_not_reloaded", error=str(error))
        else:
            self._current = current
            log.info("certificate_reloaded", cert=self._files[0])
            self._stamp = stamp

    def _take_current(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _look(self) -> Stamp:
        try:
            stats = [os.stat(path) for path in self._files]
        except OSError as error:
            raise TlsError(f"{error.filename}: {error.strerror}") from error
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        cert, key = self._files
        try:
            # Without this, OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as error:
            raise TlsError(
                f"{cert}, {key}: expected a certificate and its key in PEM: {_reason(error)}"
            ) from error
        return context


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)

"""The keys of all tenants, and the watch over the files that hold some of them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from gateway.settings import ConfigError
from gateway.tenancy.keys import KeysError, KeyTable, keys_in_file, keys_in_variable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.config import TenantConfig
    from gateway.tenancy.keys import Digest

    # (inode, size, modification time in ns) of a file; None if it is not there.
    Stamp = tuple[int, int, int] | None

log = structlog.get_logger("warmlane")

# A key that was added or taken back counts within this.
CHECK_S = 1.0


class Keyring:
    """Keys from the environment and from files; event loop only, but for reading files.

    Args:
        environ: None = this process's.

    Attributes:
        environ: Where keys in variables are.
        table: Whose each key is; replaced as a whole.
        num_errors: Tenant -> times its file could not be read.
        num_reloads: Tenant -> times its file was read again.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.table = KeyTable({})
        self.num_errors: Counter[str] = Counter()
        self.num_reloads: Counter[str] = Counter()
        self._fixed: dict[str, frozenset[Digest]] = {}
        self._files: dict[str, str] = {}
        self._in_files: dict[str, frozenset[Digest]] = {}
        self._stamps: dict[str, Stamp] = {}
        self._said: dict[str, str] = {}

    def reload(self, tenants: Sequence[TenantConfig]) -> None:
        """Read all keys.

        Raises:
            ConfigError: If some cannot be read, or two tenants have one in common; nothing has
                changed then.
        """
        fixed, in_files, stamps = {}, {}, {}
        files = {config.name: config.keys_file for config in tenants if config.keys_file}
        for config in tenants:
            where = f"tenants[{config.name}]"
            try:
                if config.key_env is not None:
                    where += ".key_env"
                    fixed[config.name] = keys_in_variable(config.key_env, self.environ)
                if config.keys_file is not None:
                    where = f"tenants[{config.name}].keys_file"
                    # Before it is read: what is written meanwhile is read once more.
                    stamps[config.name] = _stamp(config.keys_file)
                    in_files[config.name] = keys_in_file(config.keys_file)
            except KeysError as error:
                raise ConfigError(f"{where}: {error}") from error
        try:
            self.table = _table(fixed, in_files)
        except KeysError as error:
            raise ConfigError(f"tenants: {error}") from error
        self._fixed, self._files = fixed, files
        self._in_files, self._stamps, self._said = in_files, stamps, {}

    @property
    def tenants_with_files(self) -> list[str]:
        """Tenants whose keys are in a file."""
        return list(self._files)

    async def run(self) -> None:
        """Look after the files until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            for tenant, path in list(self._files.items()):
                await self._look(tenant, path)

    async def _look(self, tenant: str, path: str) -> None:
        """Read a file again if it is another one than before; a broken one changes nothing."""
        known, before = self._stamps.get(tenant), self._in_files
        try:
            # A file may lie on a network.
            stamp = await asyncio.to_thread(_stamp, path)
            if stamp == known and tenant not in self._said:
                return
            keys = await asyncio.to_thread(keys_in_file, path)
            if self._in_files is not before or self._files.get(tenant) != path:
                return  # configured anew meanwhile
            in_files = self._in_files | {tenant: keys}
            self.table = _table(self._fixed, in_files)
        except KeysError as error:
            self._fail(tenant, str(error))
            return
        self._in_files, self._stamps[tenant] = in_files, stamp
        self._said.pop(tenant, None)
        self.num_reloads[tenant] += 1
        log.info("tenant_keys_reloaded", tenant=tenant, keys=len(keys))

    def _fail(self, tenant: str, reason: str) -> None:
        """Count a file that cannot be used; said once for each reason."""
        self.num_errors[tenant] += 1
        if self._said.get(tenant) != reason:
            self._said[tenant] = reason
            log.error("tenant_keys_not_reloaded", tenant=tenant, reason=reason)


def _table(
    fixed: Mapping[str, frozenset[Digest]], in_files: Mapping[str, frozenset[Digest]]
) -> KeyTable:
    none: frozenset[Digest] = frozenset()
    names = {**fixed, **in_files}
    return KeyTable({name: fixed.get(name, none) | in_files.get(name, none) for name in names})


def _stamp(path: str) -> Stamp:
    try:
        stat = os.stat(path)  # follows links: mounted secrets are replaced by changing one
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns

"""From a request to its tenant, its tenant's budget and its cache salt; on the request's path."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from gateway.errors import Forbidden, Unauthorized
from gateway.settings import ConfigError
from gateway.tenancy.budgets import Budget, Budgets, Grant
from gateway.tenancy.estimate import completion_estimate, prompt_estimate
from gateway.tenancy.keyring import Keyring
from gateway.tenancy.peers import TrustedPeers
from gateway.tenancy.salts import (
    SALT_FIELD,
    SALT_FIELDS,
    SecretError,
    read_secret,
    salt_of,
    salt_within,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from gateway.config import Settings, TenantConfig
    from gateway.front.exchange import Exchange
    from gateway.telemetry.record import RequestRecord

# Paths whose clients speak Anthropic's API, which names the headers of limits in its own way.
ANTHROPIC_PREFIX = "/v1/messages"
# Attempts that ended so took nothing a tenant should pay for.
_FREE_OUTCOMES = frozenset(
    {"", "rejected", "connect_failed", "upstream_reset", "first_byte_timeout"}
    | {"refused", "unavailable", "failed"}
)


class Headers(Protocol):
    """Headers by name, in lower case at least."""

    def get(self, name: str, /) -> str | None:
        """Return a value, or None."""


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """Whose a request is.

    Attributes:
        name: Empty = nobody's.
        models: Names that its clients may ask for; empty = all.
        salt: Its cache salt; empty = it has none.
        budget: What it may use; None = what it likes.
        may_salt: Whether its requests may bring a salt of their own.
        may_transfer: Whether they may say where KV comes from and goes to: a trusted peer's only.
    """

    name: str = ""
    models: frozenset[str] = frozenset()
    salt: str = ""
    budget: Budget | None = None
    may_salt: bool = False
    may_transfer: bool = False

    def may_use(self, model: str) -> bool:
        """Whether its clients may ask for a model."""
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Refuse a model that is not its own.

        Raises:
            Forbidden: If it may not use it.
        """
        if not self.may_use(model):
            raise Forbidden(
                f"This API key may not use the model {model!r}.",
                param="model",
                code="model_not_allowed",
            )

    def salting(self, body: Mapping[str, Any]) -> str | None:
        """Return the salt with which a request is forwarded: its engine and the index get it.

        Returns:
            None = the body is forwarded as it is; empty = without the salt that it brings.
        """
        if self.may_salt:
            given = body.get(SALT_FIELD)
            if self.salt and isinstance(given, str) and given:
                return salt_within(self.salt, given)
            return self.salt or None
        if self.salt:
            return self.salt
        return "" if any(name in body for name in SALT_FIELDS) else None


# Whose requests are where no tenant is configured: nothing is asked or counted.
NOBODY = Tenant(may_salt=True)
_UNCOUNTED = Grant()


class Tenancy:
    """The tenants of one process; event loop only.

    Args:
        settings: Validated configuration; None has no tenants.
        environ: Where keys and the salts' secret are; None = this process's.
        clock: Monotonic seconds.
        clock_unix: Seconds since 1970.

    Attributes:
        budgets: What is used.
        keyring: Whose the keys are; ``run`` must be running for files to be read again.
        num_unauthorized: Reason -> requests refused with 401.
        peers: Whose tenant headers count.
        keeps_keys: Whether clients' keys are forwarded: where they are not the gateway's to check,
            and the workers have no other.

    Raises:
        ConfigError: If keys or the secret cannot be used.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        clock_unix: Callable[[], float] = time.time,
    ) -> None:
        self.budgets = Budgets(clock)
        self.keyring = Keyring(environ)
        self.num_unauthorized: Counter[str] = Counter()
        self._clock = clock
        self._clock_unix = clock_unix
        self.peers = TrustedPeers()
        self.keeps_keys = True
        self._tenants: dict[str, Tenant] = {}
        self._trusted: dict[str, Tenant] = {}
        if settings is not None:
            self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Have these tenants from now on; what they have spent stays spent.

        Raises:
            ConfigError: If keys or the secret cannot be used; nothing has changed then.
        """
        secret = b""
        if (name := settings.security.salt_secret_env) is not None:
            try:
                secret = read_secret(name, self.keyring.environ)
            except SecretError as error:
                raise ConfigError(f"security.salt_secret_env: {error}") from error
        self.keyring.reload(settings.tenants)
        self.peers = TrustedPeers(settings.server.access.trusted_peers)
        self.budgets.reload(settings.tenants)
        self._tenants = {config.name: self._make(config, secret) for config in settings.tenants}
        has_own_keys = any(pool.api_key_env is not None for pool in settings.pools)
        self.keeps_keys = not settings.tenants and not has_own_keys
        self._trusted = {
            name: replace(tenant, may_salt=True, may_transfer=True)
            for name, tenant in self._tenants.items()
        }

    def _make(self, config: TenantConfig, secret: bytes) -> Tenant:
        return Tenant(
            config.name,
            frozenset(config.models),
            salt_of(secret, config.name) if config.isolate_cache else "",
            self.budgets.get(config.name),
        )

    @property
    def is_open(self) -> bool:
        """Whether requests need no key, since there is no tenant."""
        return not self._tenants

    def is_configured(self, name: str) -> bool:
        """Whether there is a tenant of that name now."""
        return name in self._tenants

    def named(self, name: str) -> Tenant:
        """Return a tenant as its own clients are it, or as a trusted peer if only that can be."""
        return self._tenants.get(name) or (self.trusted(name) if name else NOBODY)

    def trusted(self, name: str) -> Tenant:
        """Return a tenant as a trusted peer names it, whether it is configured or not."""
        return self._trusted.get(name) or Tenant(name, may_salt=True, may_transfer=True)

    def identify(self, exchange: Exchange) -> Tenant:
        """Return whose a request is; before its body is read. A few microseconds.

        Raises:
            Unauthorized: If it has no key that is known, and needs one.
            InvalidRequest: If a trusted peer names its tenant in a way that could be misread.
        """
        return self.identify_head(exchange.headers, exchange.head.raw, exchange.transport)

    def identify_head(
        self, headers: Headers, raw: Any, transport: asyncio.BaseTransport | None
    ) -> Tenant:
        """Return whose a request with these headers is.

        Args:
            headers: By name.
            raw: Pairs as sent.
            transport: Of the connection it came by; None once that is lost.

        Raises:
            Unauthorized: See ``identify``, as all others.
        """
        if self.peers and transport is not None:
            name = self.peers.tenant(raw, transport.get_extra_info("peername"))
            if name:
                return self.trusted(name)
        if not self._tenants:
            return NOBODY
        given = headers.get("authorization")
        key = _bearer(given) if given is not None else None
        if key:
            known = self.keyring.table.tenant_of(key)
            if known is not None:
                return self._tenants[known]
        other = headers.get("x-api-key")
        if other:
            known = self.keyring.table.tenant_of(_bytes(other.strip()))
            if known is not None:
                return self._tenants[known]
        if key or other:
            self.num_unauthorized["unknown"] += 1
            raise Unauthorized("The API key is not valid.", code="invalid_api_key")
        self.num_unauthorized["missing"] += 1
        raise Unauthorized(
            "An API key is required, as 'authorization: Bearer KEY' or 'x-api-key: KEY'.",
            code="missing_api_key",
        )

    def admit(self, exchange: Exchange, tenant: Tenant, body: Mapping[str, Any]) -> Grant:
        """Charge a request to its tenant, and have its answer say what is left.

        Args:
            exchange: Gets the header lines, whether it is admitted or not.
            tenant: Whose it is.
            body: Parsed; its length is estimated.

        Raises:
            RateLimited: If the tenant has used up its budget.
        """
        budget = tenant.budget
        if budget is None:
            return _UNCOUNTED
        now_s = self._clock()
        prompt = completion = 0
        if budget.tokens is not None:
            prompt, completion = prompt_estimate(body), completion_estimate(body)
        short, wait_s = budget.take(prompt + completion, now_s)
        if exchange.path.startswith(ANTHROPIC_PREFIX):
            exchange.limit_lines = budget.anthropic_lines(now_s, self._clock_unix())
        else:
            exchange.limit_lines = budget.openai_lines(now_s)
        if short:
            raise self.budgets.refusal(budget, short, wait_s)
        return Grant(budget, prompt, completion)


def settle(grant: Grant, record: RequestRecord) -> None:
    """Charge what a request took, as its record tells, once it is over.

    Who leaves early pays for the prompt and for what was produced; nobody pays where the gateway or
    a worker failed before there was a first token.
    """
    if grant is _UNCOUNTED:
        return
    if _is_free(record):
        grant.settle(0, 0)
    else:
        grant.settle(record.prompt_tokens, _completion_tokens(record))


def used_tokens(record: RequestRecord) -> tuple[int, int]:
    """Return the prompt and completion tokens that a finished request is charged."""
    if _is_free(record):
        return 0, 0
    return record.prompt_tokens, _completion_tokens(record) or 0


def _is_free(record: RequestRecord) -> bool:
    is_failed = record.outcome == "upstream_error" and record.ttft_s is None
    return is_failed or not record.attempts or record.outcome in _FREE_OUTCOMES


def _completion_tokens(record: RequestRecord) -> int | None:
    told = record.completion_tokens
    return record.counted_tokens if told is None else told


def _bearer(value: str) -> bytes | None:
    """Return the token of an ``authorization`` header; None if it is of another scheme."""
    if value[:7].lower() != "bearer ":
        return None
    return _bytes(value[7:].strip())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")

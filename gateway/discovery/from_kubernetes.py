"""Workers that a Kubernetes cluster knows: listed once, then watched.

The list is the truth and a watch only what changes it: whatever is wrong with a watch ends in a new
list, and every few minutes there is one anyway.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from gateway.discovery.kube_access import Access, AccessError, from_kubeconfig, in_cluster
from gateway.discovery.kube_api import Gone, KubeApi, KubeError
from gateway.discovery.kube_objects import SERVICE_LABEL, pods, slices

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.config.discovery import KubernetesDiscovery
    from gateway.discovery.kube_api import Event
    from gateway.discovery.listing import Listing

# After a failure; doubles with each one in a row, and is spread so that gateways part.
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
# Between two watches that the server ended at once: a server that does so is not to be hammered.
MIN_WATCH_S = 1.0


class KubernetesSource:
    """Follows the pods of a selector, or the endpoints of a Service.

    Args:
        config: What to follow.
        access: Where the API is; None = as configured, found out when it runs.
        clock: Monotonic seconds.
        sleep: Waits some seconds.
        watch_s: How long one watch lasts; None = the usual time.
    """

    def __init__(
        self,
        config: KubernetesDiscovery,
        *,
        access: Access | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        watch_s: int | None = None,
    ) -> None:
        self._config = config
        self._access = access
        self._clock = clock
        self._sleep = sleep
        self._watch = {} if watch_s is None else {"watch_s": watch_s}
        self._objects: dict[str, dict[str, Any]] = {}
        self._version = ""
        self._backoff_s = FIRST_BACKOFF_S

    async def run(self, listing: Listing) -> None:
        """List and watch, again and again."""
        while True:
            try:
                api = self._api()
                try:
                    while True:
                        await self._follow(api, listing)
                finally:
                    await api.close()
            except (KubeError, AccessError) as error:
                listing.failed(str(error))
            await self._sleep(self._backoff_s * random.uniform(0.5, 1.0))
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    async def _follow(self, api: KubeApi, listing: Listing) -> None:
        """List, and watch until a new list is due.

        Raises:
            KubeError: If the API fails.
        """
        objects, self._version = await api.list()
        self._objects = {_key(item): item for item in objects}
        self._tell(listing)
        due_s = self._clock() + self._config.relist_s
        while self._clock() < due_s:
            began_s = self._clock()
            try:
                async for event in api.watch(self._version):
                    if self._take(event):
                        self._tell(listing)
                    if self._clock() >= due_s:
                        return
            except Gone:
                return
            if self._clock() - began_s < MIN_WATCH_S:
                await self._sleep(MIN_WATCH_S)
            else:
                self._backoff_s = FIRST_BACKOFF_S

    def _take(self, event: Event) -> bool:
        """Take an event into the books; whether it says anything of workers."""
        self._version = event.object["metadata"]["resourceVersion"]
        self._backoff_s = FIRST_BACKOFF_S
        if event.type == "DELETED":
            return self._objects.pop(_key(event.object), None) is not None
        if event.type in ("ADDED", "MODIFIED"):
            self._objects[_key(event.object)] = event.object
            return True
        return False

    def _tell(self, listing: Listing) -> None:
        read = pods if self._config.selector is not None else slices
        try:
            found, bad = read(self._objects.values(), self._config)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            reason = f"expected pods or EndpointSlices, got something else: {error!r}"
            raise KubeError(reason) from error
        # In one order, whatever order they came in.
        listing.told(sorted(found, key=lambda one: one.worker.id), bad)

    def _api(self) -> KubeApi:
        config = self._config
        access = self._access
        if access is None:
            access = (
                in_cluster()
                if config.kubeconfig is None
                else from_kubeconfig(config.kubeconfig, config.context)
            )
        namespace = config.namespace or access.namespace
        if config.selector is not None:
            path, selector = f"/api/v1/namespaces/{namespace}/pods", config.selector
        else:
            path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            selector = f"{SERVICE_LABEL}={config.service}"
        return KubeApi(access, path, selector, **self._watch)


def _key(item: dict[str, Any]) -> str:
    name: str = item["metadata"]["name"]
    return name

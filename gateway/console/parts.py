"""What the console looks at: the parts of a gateway, none of which it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    from gateway.discovery.discovery import Discovery
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.sharing import Sharing
    from gateway.misses.report import MissReport
    from gateway.routing.dispatch import Dispatcher
    from gateway.warm.warmer import Warmer
    from gateway.worth.worth import Worth

    class Parts(Protocol):
        """A whole gateway; ``sharing`` is None where its index is its own."""

        fleet: Fleet
        dispatcher: Dispatcher
        misses: MissReport
        worth: Worth
        warmer: Warmer
        discovery: Discovery
        sharing: Sharing | None

"""What the console and all other onlookers look at: the parts of a gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    from gateway.discovery.discovery import Discovery
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.sharing import Sharing
    from gateway.misses.report import MissReport
    from gateway.replicas.load import LoadExchange
    from gateway.routing.dispatch import Dispatcher
    from gateway.tenancy import Tenancy
    from gateway.tenancy.exchange import BudgetExchange
    from gateway.warm.warmer import Warmer
    from gateway.worth.worth import Worth

    class Parts(Protocol):
        """A whole gateway; what it shares with others is None where there are none."""

        fleet: Fleet
        dispatcher: Dispatcher
        misses: MissReport
        worth: Worth
        warmer: Warmer
        discovery: Discovery
        tenancy: Tenancy
        sharing: Sharing | None
        exchange: LoadExchange | None
        spending: BudgetExchange | None

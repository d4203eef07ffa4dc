"""Who sends a request, what it may use, how much of it, and under which cache salt."""

from gateway.tenancy.budgets import Grant
from gateway.tenancy.peers import TrustedPeers
from gateway.tenancy.tenancy import NOBODY, Tenancy, Tenant, settle

__all__ = ["NOBODY", "Grant", "Tenancy", "Tenant", "TrustedPeers", "settle"]

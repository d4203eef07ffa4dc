"""A token bucket that several gateways draw from, each on its own and without waiting for others.

Source: token bucket (Turner 1986), filled by time, drained by what is spent.
"""

from __future__ import annotations

# A balance below this many times the limit says nothing more; what is spent beyond it is forgiven.
MAX_DEBT = 5.0
MINUTE_S = 60.0
# By then every gateway has told what it spent while it was not heard.
CREDIT_S = 2.5


class Bucket:
    """What is left of one limit; no clock of its own.

    The balance counts everybody's spending, as far as it is known here: others' is subtracted when
    they tell of it (``spent_elsewhere``). Between two reports (``reported``) a gateway spends no
    more than its share of what was left, so that all of them together stay within the balance.
    The first grant after a report needs no share, or a limit smaller than the number of gateways
    would let nobody through: this is the error, one grant per gateway and report. It is repaid,
    since the balance goes below zero with it.

    While others cannot be heard, each has its share only, of what is left and of what comes in; the
    rest is given back once their spending is known again.

    Args:
        limit: Most per minute, and most at once.
        now_s: Monotonic seconds.

    Attributes:
        limit: As given.
        spent: All that was spent here, net of what was given back.
    """

    __slots__ = (
        *("_at_s", "_balance", "_credit", "_credit_until_s", "_per_s", "_unreported", "_withheld"),
        *("is_alone", "limit", "share", "spent"),
    )

    def __init__(self, limit: float, now_s: float) -> None:
        self.limit = limit
        self.spent = 0.0
        # This gateway's part of what is left, and whether the other parts' spending is unknown.
        self.share = 1.0
        self.is_alone = False
        self._balance = limit
        self._per_s = limit / MINUTE_S
        self._at_s = now_s
        self._unreported = 0.0
        self._withheld = 0.0
        # What was withheld beyond the limit: others have spent it, and not told yet.
        self._credit = 0.0
        self._credit_until_s = 0.0

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return how long until ``amount`` may be spent; 0 = now.

        What is more than the limit may be spent when the bucket is full: it would never be
        otherwise.
        """
        self._fill(now_s)
        needed = amount if amount < self.limit else self.limit
        missing = needed - self._balance
        if self.share < 1.0 and self._unreported > 0.0 and not self.is_alone:
            mine = (self._balance + self._unreported) * self.share - self._unreported
            missing = max(missing, needed - mine)
        if missing <= 0.0:
            return 0.0
        return missing / (self._per_s * (self.share if self.is_alone else 1.0))

    def spend(self, amount: float) -> None:
        """Take ``amount``, more than is left if need be; less than zero gives back."""
        self._set(self._balance - amount)
        self.spent += amount
        self._unreported = max(0.0, self._unreported + amount)

    def remaining(self, now_s: float) -> float:
        """Return what is left, not below zero."""
        self._fill(now_s)
        return max(0.0, self._balance)

    def reset_s(self, now_s: float) -> float:
        """Return how long until the bucket is full."""
        self._fill(now_s)
        return (self.limit - self._balance) / self._per_s

    def reported(self) -> None:
        """Others have been told of all that was spent here."""
        self._unreported = 0.0

    def spent_elsewhere(self, amount: float, now_s: float) -> None:
        """Take off what another gateway spent; less than zero gives back."""
        self._fill(now_s)
        if self._credit and amount > 0.0:
            covered = min(amount, self._credit) if now_s < self._credit_until_s else 0.0
            self._credit = self._credit - covered if covered else 0.0
            amount -= covered
        self._set(self._balance - amount)

    def balance(self, now_s: float) -> float:
        """Return what is left for all, as known here; negative where too much was spent."""
        self._fill(now_s)
        return self._balance + self._withheld

    def adopt(self, balance: float, now_s: float) -> None:
        """Take over what another gateway knows to be left, if that is less."""
        self._fill(now_s)
        self._set(min(self._balance, balance))

    def set_share(self, share: float, *, is_alone: bool, now_s: float) -> None:
        """Say which part of what is left is this gateway's.

        Args:
            share: Above 0, at most 1.
            is_alone: Whether the others cannot be heard.
            now_s: Monotonic seconds.
        """
        self._fill(now_s)
        if self.is_alone:
            balance = self._balance + self._withheld
            self._credit = max(0.0, balance - self.limit)
            self._credit_until_s = now_s + CREDIT_S
            self._set(balance)
            self._withheld = 0.0
        if is_alone:
            self._withheld = max(0.0, self._balance) * (1.0 - share)
            self._balance -= self._withheld
        self.share, self.is_alone = share, is_alone

    def resize(self, limit: float, now_s: float) -> None:
        """Have another limit from now on; what was spent stays spent."""
        self._fill(now_s)
        balance = self._balance + limit - self.limit
        self.limit, self._per_s = limit, limit / MINUTE_S
        self._set(balance)

    def _set(self, balance: float) -> None:
        # On every request's path: comparisons cost half of what min and max do.
        limit = self.limit
        if balance > limit:
            balance = limit
        elif balance < -MAX_DEBT * limit:
            balance = -MAX_DEBT * limit
        self._balance = balance

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._at_s) * self._per_s
        if gained <= 0.0:
            return
        self._at_s = now_s
        if self.is_alone:
            most = MAX_DEBT * self.limit
            self._withheld = min(most, self._withheld + gained * (1.0 - self.share))
            gained *= self.share
        self._set(self._balance + gained)

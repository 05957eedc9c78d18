"""What a pool tells of its sandboxes: to who listens, to a ledger, to who looks later, and as counts."""

from __future__ import annotations

from envkit import clock
from envkit.errors import SandboxEndedError, SandboxRefusedError
from envkit.types import Cause, CauseKind, SandboxState, SandboxView

from .history import Events, Ledger, Past, Saver
from .instance import Member, ended
from .metrics import Tally

ALERT_S = 60.0
"""Seconds from one alert to the next of the same kind about the same sandbox or stock."""


class Journal:
    """Takes down what happens to the sandboxes of one pool.

    Args:
        ledger: Where they are written down as well; None for nowhere.

    Attributes:
        events: What happened.
        past: Those that are over.
        tally: How much of what has happened.
        saver: Writes to the ledger.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        self.events = Events()
        self.past = Past()
        self.tally = Tally()
        self.saver = None if ledger is None else Saver(ledger, self._unsaved)
        self._alerted: dict[tuple[object, str], float] = {}

    def entered(self, member: Member) -> None:
        """A sandbox is in another state."""
        self._told(member.record())
        if member.state is SandboxState.STARTING:
            self.tally.starts += 1
        elif member.state is SandboxState.LOST:
            # What runs the commands of the pool's owner, such as environment servers, never exits if all is well.
            self.tally.over(member.ended_by().kind, may_exit=bool(member.spec.command) and member.payer is not None)
        elif member.has_failed and not isinstance(member.failure, (SandboxRefusedError, SandboxEndedError)):
            self.tally.failed_starts += 1

    def left(self, member: Member) -> None:
        """Nothing is left of a sandbox."""
        if not member.is_forgotten:
            self.past.add(member.record(), now=clock.now())

    def renamed(self, before: SandboxView, name: str) -> None:
        """A spare has become what `name` stands for."""
        self._told(ended(before, Cause(CauseKind.STOPPED, f"lent as {name}")))

    def ended(self, view: SandboxView) -> None:
        """What another process had left is over."""
        self._told(view)
        self.past.add(view, now=clock.now())

    def alert(self, kind: str, member: Member | None, text: str, *, about: object = "") -> None:
        """Something is to be looked at: with a sandbox, or with something else, which `about` is."""
        sandbox_id, tenant = ("", "") if member is None else (member.id, member.tenant)
        now = clock.now()
        subject = (sandbox_id or about, kind)
        if now - self._alerted.get(subject, -ALERT_S) >= ALERT_S:
            self._alerted[subject] = now
            self.events.emit(kind, text, sandbox_id=sandbox_id, tenant=tenant)

    def forget(self) -> None:
        """Forget what need not be known any longer."""
        now = clock.now()
        self.past.forget(now=now)
        self._alerted = {about: at for about, at in self._alerted.items() if now - at < ALERT_S}

    def _told(self, view: SandboxView) -> None:
        last = view.phases[-1]
        self.events.emit(
            "state", last.reason, sandbox_id=view.id, tenant=view.tenant, state=last.state, cause=last.cause
        )
        if self.saver is not None:
            self.saver.put(view)

    def _unsaved(self, view: SandboxView, why: str) -> None:
        self.events.emit("ledger", f"it was not written down: {why}", sandbox_id=view.id, tenant=view.tenant)

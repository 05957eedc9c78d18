"""Whose silence it is: what our own event loop slept too long is not that of who is asked."""

OWN_LATENESS_S = 0.25
"""How late a timer of ours may be before that counts as our own lateness."""


def forgiven(heard_at: float, late_s: float, *, now: float) -> float:
    """Return the moment from which a silence counts, when a timer of ours was `late_s` seconds late just now.

    Args:
        heard_at: From when it counted until now: the last answer, unless we were late since.
        late_s: How late it was; less than `OWN_LATENESS_S` is nothing.
        now: The time, on the clock of `heard_at`.
    """
    return min(heard_at + late_s, now) if late_s > OWN_LATENESS_S else heard_at

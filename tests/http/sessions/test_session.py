"""The states of a session and their events."""

from __future__ import annotations

from itertools import product

import pytest

from envkit.http.sessions.session import SessionEvent, SessionState, after

S, E = SessionState, SessionEvent
ALLOWED = {
    (S.OPENING, E.OPENED): S.READY,
    (S.OPENING, E.FAILED): S.BROKEN,
    (S.READY, E.STEP): S.STEPPING,
    (S.READY, E.GRADE): S.GRADING,
    (S.READY, E.FAILED): S.BROKEN,
    (S.STEPPING, E.ANSWERED): S.READY,
    (S.STEPPING, E.ENDED): S.FINISHED,
    (S.STEPPING, E.PLAYED): S.UNGRADED,
    (S.STEPPING, E.FAILED): S.BROKEN,
    (S.UNGRADED, E.GRADE): S.GRADING,
    (S.UNGRADED, E.FAILED): S.BROKEN,
    (S.GRADING, E.ENDED): S.FINISHED,
    (S.GRADING, E.FAILED): S.BROKEN,
}


@pytest.mark.parametrize(("state", "event"), list(product(S, E)))
def test_a_session_moves_only_as_the_table_says(state: SessionState, event: SessionEvent) -> None:
    if (state, event) in ALLOWED:
        assert after(state, event) is ALLOWED[state, event]
    else:
        with pytest.raises(ValueError, match=f"event {event} is not possible for a session in state {state}"):
            after(state, event)

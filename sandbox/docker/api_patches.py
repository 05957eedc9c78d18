"""Workarounds for the package `docker`: it reads events without a timeout, and leaves unread streams open."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from envkit.installation import load


def events(
    api: Any, since: float, until: float, filters: Mapping[str, Sequence[str]]
) -> Generator[Mapping[str, Any], None, None]:
    """Yield the daemon's events between two Unix times. If `until` is in the future, wait for events until then.

    The events end early if the daemon exits.

    Raises:
        OSError: The daemon refuses the request, or does not answer within the timeout of `api`.
    """
    broken_off = load("requests.exceptions").ChunkedEncodingError
    query = {"since": f"{since:.3f}", "until": f"{until:.3f}", "filters": json.dumps(filters)}
    address = f"{api.base_url}/v{api.api_version}/events"
    with api.get(address, params=query, stream=True, timeout=api.timeout) as answer:
        answer.raise_for_status()
        with suppress(broken_off):
            for line in answer.iter_lines():
                yield json.loads(line)


def close_stream(lines: Any) -> None:
    """Close the connection of a stream of the package that was not read to its end; the package leaves it open."""
    if lines.gi_frame is not None:
        lines.gi_frame.f_locals["response"].close()

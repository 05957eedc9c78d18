"""The proxy that is checked: our own, or that at the URL in ``ENVKIT_AGENT_PROXY``; see README.md."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from anyio.from_thread import start_blocking_portal

from tests.conformance.agents.client import ROUTES
from tests.conformance.agents.served import AnyProxy, ForeignProxy, OwnProxy


@pytest.fixture(scope="session")
def served() -> Iterator[AnyProxy]:
    if url := os.environ.get("ENVKIT_AGENT_PROXY"):
        key, model, routes = (os.environ.get(f"ENVKIT_AGENT_PROXY_{name}", "") for name in ("KEY", "MODEL", "ROUTES"))
        yield ForeignProxy(url.rstrip("/"), key, model, routes.split(",") if routes else ROUTES)
        return
    with start_blocking_portal() as portal:
        made = OwnProxy(portal)
        with portal.wrap_async_context_manager(made.served()):
            yield made


@pytest.fixture
def proxy(served: AnyProxy) -> Iterator[AnyProxy]:
    """The proxy, for what its clients see."""
    yield served
    while served.agents:
        served.agents.pop().close()


@pytest.fixture
def own(proxy: AnyProxy) -> OwnProxy:
    """Our own proxy, for what only it shows."""
    if not isinstance(proxy, OwnProxy):
        pytest.skip("ENVKIT_AGENT_PROXY: needs a scripted policy behind the proxy")
    return proxy

"""Two tenants and an administrator on one server: tenants cannot access each other's resources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.serve.gateway import gateway, memory

pytestmark = pytest.mark.bwrap

SMALL = {"disk_mib": 8, **memory(64)}
RUN = {"argv": ["cat", "whose"], "timeout_s": 5}


def test_tenants_are_isolated(tmp_path: Path) -> None:
    with (
        gateway(tmp_path) as server,
        server.client(server.token("acme", "sandbox")) as acme,
        server.client(server.token("beta", "sandbox")) as beta,
        server.client(server.token("games", "play")) as player,
        server.client(server.token("ops", "admin")) as admin,
    ):
        for tenant, client in (("acme", acme), ("beta", beta)):
            made = client.put("/v1/sandboxes/mine", json=SMALL)
            assert (made.status_code, made.json()["sandbox_id"], made.json()["tenant"]) == (200, "mine", tenant)
            client.put("/v1/sandboxes/mine/files?path=whose", content=tenant).raise_for_status()
        assert [acme.post("/v1/sandboxes/mine/exec", json=RUN).json()["stdout"]] == ["acme"]
        assert [one["sandbox_id"] for one in acme.get("/v1/sandboxes").json()["sandboxes"]] == ["mine"]

        kept = acme.post("/v1/sandboxes/mine/snapshot").json()["snapshot"]
        assert beta.put("/v1/sandboxes/new", json={**SMALL, "snapshot": kept}).status_code == 404
        shared = next(one for one in admin.get("/v1/sandboxes").json()["sandboxes"] if one["tenant"] == "")
        for name in ("acme:mine", shared["sandbox_id"], shared["backend_id"], "pool-1", "%61cme:mine", "..%2Fmine"):
            for verb, rest, body in (("GET", "", None), ("POST", "/exec", RUN), ("GET", "/logs", None)):
                answer = beta.request(verb, f"/v1/sandboxes/{name}{rest}", json=body)
                # The router decodes %2F; the handler of POST then rejects the id "../mine".
                status = 400 if name == "..%2Fmine" and verb == "POST" else 404
                assert answer.status_code == status, (name, verb, answer.text)
            assert beta.delete(f"/v1/sandboxes/{name}").status_code in (200, 404)
        assert admin.post("/v1/sandboxes/acme:mine/exec", json=RUN).json()["stdout"] == "acme"

        for path in ("/v1/sandboxes", "/v1/sandboxes/mine", "/v1/sandboxes/acme:mine/files?path=whose"):
            assert player.get(path).status_code == 403
        assert acme.put("/v1/sessions/a", json={"env_id": "FrozenLake-v0", "seed": 1}).status_code == 403
        for spec in ({"image": "/"}, {"network": "open"}, {"profile": "system"}, {"runtime": "runc"}):
            assert acme.put("/v1/sandboxes/other", json={**SMALL, **spec}).status_code == 403
        assert beta.delete("/v1/sandboxes/mine").status_code == 200
        assert acme.post("/v1/sandboxes/mine/exec", json=RUN).json()["stdout"] == "acme"

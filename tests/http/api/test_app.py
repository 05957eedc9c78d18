"""The HTTP API on a real server: the answers of each route, also to invalid input."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx

from envkit.registry import EnvSpec
from tests.http.envs import TOOL
from tests.http.stage import over_http

COUNT = {"env_id": "Count-v0", "seed": 7}
ENVS = [EnvSpec("Count-v0", "tests.http.envs:Count", {"end": 3}, summary="Counts its steps.")]


def test_a_session_is_created_played_inspected_and_deleted() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        created = await client.put("/v1/sessions/a", json={**COUNT, "options": {"end": 2}})
        assert (created.status_code, created.headers["content-type"]) == (200, "application/json")
        assert created.json() == {
            "turn": 0,
            "observation": "seed 7",
            "legal_moves": ["on", "back"],
            "images": [],
            "info": {"legal_moves": ["on", "back"], "metrics": {}},
        }
        assert (await client.put("/v1/sessions/a", json={**COUNT, "options": {"end": 2}})).json() == created.json()
        first = await client.post("/v1/sessions/a/step", json={"turn": 0, "action": "x"})
        assert first.json() == {
            "turn": 1,
            "observation": "1 x",
            "legal_moves": ["on", "back"],
            "images": [],
            "reward": 0.5,
            "terminated": False,
            "truncated": False,
            "info": {"legal_moves": ["on", "back"]},
        }
        assert (await client.post("/v1/sessions/a/step", json={"turn": 0, "action": "x"})).content == first.content
        last = (await client.post("/v1/sessions/a/step", json={"turn": 1, "action": "y"})).json()
        assert (last["turn"], last["terminated"]) == (2, True)
        seen = (await client.get("/v1/sessions/a")).json()
        assert seen | {"idle_s": 0} == {
            "session_id": "a",
            "env_id": "Count-v0",
            "seed": 7,
            "options": {"end": 2},
            "state": "finished",
            "turn": 2,
            "idle_s": 0,
        }
        assert [one["session_id"] for one in (await client.get("/v1/sessions")).json()["sessions"]] == ["a"]
        for _ in range(2):
            assert (await client.delete("/v1/sessions/a")).json() == {"done": True}
        assert (await client.get("/v1/sessions")).json() == {"sessions": []}

    over_http(main)


def test_a_step_out_of_order_is_answered_with_the_turn_of_the_session() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        await client.put("/v1/sessions/a", json=COUNT)
        await client.post("/v1/sessions/a/step", json={"turn": 0, "action": "x"})
        late = await client.post("/v1/sessions/a/step", json={"turn": 4, "action": "x"})
        assert (late.status_code, late.headers["content-type"]) == (409, "application/problem+json")
        assert late.json() == {
            "type": "step_order",
            "title": "StepOrderError",
            "status": 409,
            "detail": "session a: expected turn 1, got 4",
            "retry": False,
            "fields": {"detail": "session a: expected turn 1, got 4"},
            "turn": 1,
        }
        other = await client.post("/v1/sessions/a/step", json={"turn": 0, "action": "y"})
        assert (other.status_code, other.json()["type"], other.json()["turn"]) == (409, "session_conflict", 1)

    over_http(main)


def test_a_slow_reset_is_answered_with_202_until_it_is_done() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        task = {"env_id": "Sleeper-v0", "seed": 0, "options": {"reset_s": 0.3}}
        slow = await client.put("/v1/sessions/a", json=task)
        assert (slow.status_code, slow.headers["retry-after"]) == (202, "1")
        assert slow.json() == {"turn": 0, "state": "opening"}
        while (done := await client.put("/v1/sessions/a", json=task)).status_code == 202:
            pass
        assert (done.status_code, done.json()["observation"]) == (200, "awake")

    over_http(main, slow_reset_s=0.05)


def test_a_slow_grader_is_answered_with_202_until_it_is_done() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        options = {"grade_s": 0.3, "grade": 0.5}
        start = await client.put("/v1/sessions/a", json={"env_id": "Graded-v0", "seed": 0, "options": options})
        assert (start.json()["is_graded"], start.json()["system"], start.json()["tools"]) == (True, "Be brief.", [TOOL])
        slow = await client.post("/v1/sessions/a/grade")
        assert (slow.status_code, slow.headers["retry-after"], slow.json()) == (202, "1", {"state": "grading"})
        while (done := await client.post("/v1/sessions/a/grade")).status_code == 202:  # noqa: ASYNC110
            await anyio.sleep(0.05)
        assert (done.status_code, done.json()) == (200, {"grade": 0.5})

    over_http(main, slow_reset_s=0.05)


def test_an_ordinary_session_has_neither_a_grade_nor_fields_for_tools() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        start = await client.put("/v1/sessions/a", json={"env_id": "Count-v0", "seed": 7})
        assert set(start.json()) == {"turn", "observation", "legal_moves", "images", "info"}
        step = await client.post("/v1/sessions/a/step", json={"turn": 0, "action": "x"})
        assert "role" not in step.json()
        refused = await client.post("/v1/sessions/a/grade")
        assert (refused.status_code, refused.json()["type"]) == (409, "step_order")
        assert "its episode has no grader" in refused.json()["detail"]

    over_http(main)


def test_a_batch_gets_one_outcome_per_step_in_order() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        await client.put("/v1/sessions/a", json=COUNT)
        await client.put("/v1/sessions/b", json=COUNT)
        await client.put("/v1/sessions/slow", json={"env_id": "Sleeper-v0", "seed": 0})
        batch = [
            {"session_id": "slow", "turn": 0, "action": "sleep 0.01"},
            {"session_id": "b", "turn": 0, "action": "one"},
            {"session_id": "nobody", "turn": 0, "action": "x"},
            {"session_id": "a", "turn": 3, "action": "x"},
            {"session_id": "slow", "turn": 1, "action": "sleep 0"},
            {"session_id": "b", "turn": 1, "action": "raise"},
            {"turn": 0},
            17,
            {"session_id": "b", "turn": 2, "action": "x"},
        ]
        answer = await client.post("/v1/sessions:step", json=batch)
        assert answer.status_code == 200
        found = [
            (one["result"]["turn"], one["result"]["observation"]) if "result" in one else one["error"]["type"]
            for one in answer.json()
        ]
        assert found == [
            (1, "1 slept"),
            (1, "1 one"),
            "session_not_found",
            "step_order",
            (2, "2 slept"),
            "env_error",
            "bad_request",
            "bad_request",
            "session_broken",
        ]
        assert answer.json()[3]["error"]["turn"] == 0
        assert (await client.post("/v1/sessions:step", json=[])).json() == []

    over_http(main)


def test_a_full_server_is_alive_but_not_ready() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        ready = await client.get("/v1/ready")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "capacity": 1, "leased": 0})
        await client.put("/v1/sessions/a", json=COUNT)
        refused = await client.put("/v1/sessions/b", json=COUNT)
        assert (refused.status_code, refused.json()["type"], refused.json()["retry"]) == (503, "no_capacity", True)
        assert refused.headers["retry-after"] == "1"
        ready = await client.get("/v1/ready")
        assert (ready.status_code, ready.json()) == (
            503,
            {"ready": False, "capacity": 1, "leased": 1, "why": "all 1 episode slots are in use"},
        )
        health = await client.get("/v1/health")
        assert (health.status_code, health.json()["status"], health.json()["protocol"]) == (200, "alive", 1)

    over_http(main, capacity=1)


def test_the_list_of_environments_is_that_of_the_server() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/envs")).json() == {
            "envs": [{"id": "Count-v0", "summary": "Counts its steps.", "options": {"end": 3}, "replayable": True}]
        }

    over_http(main, envs=ENVS)


def test_an_observation_that_json_cannot_encode_is_an_environment_error() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for action in ("odd", "surrogate"):
            await client.put(f"/v1/sessions/{action}", json=COUNT)
            answer = await client.post(f"/v1/sessions/{action}/step", json={"turn": 0, "action": action})
            assert (answer.status_code, answer.json()["type"]) == (500, "env_error")
            assert "is not JSON" in answer.json()["detail"]

    over_http(main)


def test_a_body_that_is_too_large_is_refused_whether_announced_or_not() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 100

    async def main(client: httpx.AsyncClient) -> None:
        for verb, path in (("POST", "a/step"), ("PUT", "a")):
            for content in (b" " * 3000, chunks()):
                answer = await client.request(verb, f"/v1/sessions/{path}", content=content)
                assert (answer.status_code, answer.json()["type"]) == (413, "too_large")
        assert (await client.get("/v1/health")).status_code == 200

    over_http(main, max_request_bytes=2000)


def test_metrics_count_sessions_steps_and_errors() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        await client.put("/v1/sessions/a", json=COUNT)
        await client.post("/v1/sessions/a/step", json={"turn": 0, "action": "x"})
        await client.post("/v1/sessions/a/step", json={"turn": 0, "action": "x"})
        await client.post("/v1/sessions/a/step", json={"turn": 7, "action": "x"})
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        lines = answer.text.splitlines()
        for line in (
            'envkit_sessions{state="ready"} 1.0',
            "envkit_slots 4.0",
            "envkit_slots_leased 1.0",
            "envkit_sessions_created_total 1.0",
            "envkit_steps_total 1.0",
            "envkit_step_seconds_count 1.0",
            'envkit_step_seconds_bucket{le="+Inf"} 1.0',
            'envkit_errors_total{code="step_order"} 1.0',
        ):
            assert line in lines

    over_http(main)

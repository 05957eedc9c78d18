"""Small agents, whose calls and steps depend on what they are given."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envkit.trainer_bridge.agents.programs import AgentTask


async def twice(task: AgentTask) -> None:
    """Call the policy and act on its answers, in two rooms. Each system prompt has another number."""
    await _play(task, 2)


async def once(task: AgentTask) -> None:
    await _play(task, 1)


async def _play(task: AgentTask, rooms: int) -> None:
    import httpx  # not in the program, which starts often

    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    async with httpx.AsyncClient(base_url=task.base_url, headers={"authorization": f"Bearer {task.api_key}"}) as client:
        for room in range(rooms):
            system = {"role": "system", "content": f"It is {room} o'clock."}
            answered = await client.post("/chat/completions", json={"model": "m", "messages": [system, *messages]})
            messages.append(answered.raise_for_status().json()["choices"][0]["message"])
            seen = await task.step(f"<answer>{'left' if len(messages[-1]['content']) % 2 else 'right'}</answer>")
            messages.append({"role": "user", "content": seen})


def main() -> None:
    """Be an agent that is a program: call the policy as often as an argument and a variable say."""
    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    for _ in range(int(sys.argv[1]) + int(os.environ.get("MORE", "0"))):
        content = json.dumps({"model": "m", "messages": [{"role": "user", "content": "left or right?"}]}).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{base}/chat/completions", content, headers)).read()


if __name__ == "__main__":
    main()

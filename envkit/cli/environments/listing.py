"""``envkit list``: the registered environments."""

from __future__ import annotations

from envkit.cli.tables import echo


def list_envs() -> None:
    """List the registered environments."""
    from envkit.wiring.environments import registered

    specs = registered()
    width = max((len(spec.id) for spec in specs), default=0)
    for spec in specs:
        echo(f"{spec.id:<{width}}  {spec.summary}".rstrip())

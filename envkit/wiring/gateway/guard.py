"""The guard in front of all environments of a server: its clients do not choose files and images of the machine."""

from __future__ import annotations

from envkit.errors import OptionError, UnknownEnvError
from envkit.registry import foreign_choices
from envkit.types import Task
from envkit.wiring.environments import find


def refuse_operator_options(task: Task) -> None:
    """Reject a task of a client that has options which only the operator sets.

    See `envkit.registry.EnvSpec.operator_options`. Environments open such files with the rights of the server or of a
    sandbox that tenants share, and the policy for clients does not apply to the images of their sandboxes.

    Raises:
        OptionError: The task has an option of the operator with which its environment is not registered.
    """
    try:
        names = foreign_choices(find(task.env_id), task.options)
    except UnknownEnvError:  # only the image of the sandboxes may have it
        return
    for name in names:
        remedy = "register an environment with this option there"
        raise OptionError(name, f"only the operator of the server may set it; {remedy}, or leave it out")

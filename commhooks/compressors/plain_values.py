"""Plain dicts and lists in place of the containers of OmegaConf, which Hydra passes to the objects that it makes;
our words in place of its errors."""

import re
import sys
from typing import Any

from commhooks.errors import HookConfigError


def plain(name: str, value: Any) -> Any:
    """`value` with all interpolations resolved and each container of OmegaConf, also inside dicts and lists, replaced.

    Args:
        name: of the argument, for messages.

    Raises:
        HookConfigError: a value is missing ("???"), or an interpolation leads nowhere.
    """
    if "omegaconf" not in sys.modules:  # it is slow to import, and without it there is none of its containers
        return value
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if OmegaConf.is_config(value):
        try:
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise HookConfigError(f"{name}: {error.full_key}: {unresolved(error)}") from error
    if type(value) is dict:
        return {key: plain(f"{name}.{key}", each) for key, each in value.items()}
    if type(value) is list:
        return [plain(f"{name}[{place}]", each) for place, each in enumerate(value)]
    return value


def unresolved(error: Exception) -> str:
    """Why OmegaConf could not read a value, in words for users: it is missing, or has a "${...}" without a value."""
    text = str(error).partition("\n")[0]
    if text.startswith("Missing mandatory value"):
        return "'???' stands for a value that is still missing: write it"
    name = re.search(r"'([^']*)' not found|interpolation type (\w+)|mandatory value: (\S+)", text)
    if name is None:
        return "'${' begins a reference to another key that cannot be read: write ${key}, ${oc.env:NAME} or the value"
    return f"its ${{...}} leads to {next(filter(None, name.groups()))!r}, which is not there"

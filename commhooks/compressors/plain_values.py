"""Plain dicts and lists in place of OmegaConf's containers, which Hydra passes to the objects that it makes."""

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
            reason = str(error).splitlines()[0]
            raise HookConfigError(f"{name}: {error.full_key}: {reason}") from error
    if type(value) is dict:
        return {key: plain(f"{name}.{key}", each) for key, each in value.items()}
    if type(value) is list:
        return [plain(f"{name}[{place}]", each) for place, each in enumerate(value)]
    return value

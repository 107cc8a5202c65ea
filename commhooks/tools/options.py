"""Options of a hook on a command line."""

from typing import Any

from commhooks.errors import HookConfigError


def parse_options(texts: list[str]) -> dict[str, Any]:
    """`["random_seed=1", "exclude=['*embed*']"]` as a dict; values are YAML."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for text in texts:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise HookConfigError(f"--options {text}: expected NAME=VALUE, for example matrix_approximation_rank=4")
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(texts), resolve=True)
    except OmegaConfBaseException as error:
        raise HookConfigError(f"--options {' '.join(texts)}: {error.full_key}: {str(error).splitlines()[0]}") from None
    except YAMLError:
        quoted = "\"exclude=['*embed*']\""
        raise HookConfigError(
            f"--options {' '.join(texts)}: a value is not YAML; put text with special characters in quotes, and the "
            f"whole in quotes for the shell: --options {quoted}"
        ) from None
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}

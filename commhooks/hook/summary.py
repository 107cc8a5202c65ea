"""The summary of a hook, which rank 0 logs at the end of the first backward pass."""

from collections.abc import Sequence


def summary(name: str, details: Sequence[str], plain_until: str, effect: str) -> str:
    """What a hook does, in one line.

    Args:
        details: the main options, the kernel and the nodes, such as "rank 2".
        plain_until: until when the gradients are averaged by plain all-reduce, such as "step 100"; "" if the hook acts.
        effect: what the hook does and sends once it acts; "" if that is unknown.
    """
    about = f"{name} ({'; '.join(details)})" if details else name
    if plain_until:
        effect = f"plain all-reduce until {plain_until}, then {effect}"
    return f"{about}: {effect}" if effect else about

"""When the fragments of the weights are exchanged in a round (Douillard et al.: Streaming DiLoCo, 2025, section 2)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One fragment in one round.

    Attributes:
        fragment: its number, from 0.
        sent_after: passes of the round after which its differences are sent.
        due_after: passes after which the weights become the new anchor.
    """

    fragment: int
    sent_after: int
    due_after: int


def turns(every: int, fragments: int, delay: int) -> list[Turn]:
    """The turns of a round of `every` passes, spread evenly, the last one at its end. No two overlap, because `delay`
    is less than the distance between them."""
    distance = every // fragments
    return [Turn(each, (each + 1) * distance - delay, (each + 1) * distance) for each in range(fragments)]

"""What a seeded fault is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs exactly once in `file`, becomes `new`; then `test` must fail. `cuda`: needs a GPU."""

    name: str
    file: str
    old: str
    new: str
    test: str
    cuda: bool = False

"""Show sizes in kB or in MB."""

from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of sizes, for all numbers of one text or table."""

    name: str
    size: int

    @classmethod
    def of(cls, largest: float) -> "Unit":
        """The unit in which `largest` bytes, and parts of that, can be read."""
        return cls("kB", 1000) if largest < 10**6 else cls("MB", 10**6)

    def number(self, size: float) -> str:
        return f"{size / self.size:.3f}"

    def text(self, size: float) -> str:
        return f"{self.number(size)} {self.name}"

"""`commhooks.Shards`: how FSDP2's own collectives are compressed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from commhooks.comm.nodes import RanksPerNode
from commhooks.errors import HookConfigError, invalid
from commhooks.options import as_python, check_choice, converted

__all__ = ["Shards"]

FORMS = ("int8", "bf16")
"""The values of `weights` and `gradients`, and the names in place of a `Shards`."""
_UNIT = 16
_LARGEST_BLOCK = 2**16


@dataclass(frozen=True, kw_only=True)
class Shards:
    """FSDP2's all-gather and reduce-scatter send fewer bytes; see docs/fsdp2.md.

    Vectors and scalars keep their dtype. There is no error feedback: nothing is learned or saved.

    Args:
        weights: what the all-gather sends: "int8" (integers of 8 bits with a scale per block),
            "bf16", or None (as without this option). Every rank computes with the same rounded
            weights; the optimizer keeps its shard as it is.
        gradients: what the reduce-scatter sends, likewise. Sums are computed in float32.
        block_size: consecutive elements of a parameter's shard that share a scale of 4 bytes; a
            multiple of 16. Smaller blocks are more exact and send more scales.
        ranks_per_node: reduce and copy inside a node first, so that each number crosses between
            two nodes once. A number: that many consecutive ranks form a node. "auto": ranks started
            by the same launcher, or with the same host name. None: directly between all ranks.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case-sensitive) that keep
            their dtype.
    """

    weights: str | None = "int8"
    gradients: str | None = "int8"
    block_size: int = 128
    ranks_per_node: RanksPerNode = "auto"
    exclude: Sequence[str] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        for option in ("weights", "gradients"):
            check_choice(f"Shards: {option}", getattr(self, option), (*FORMS, None))
        if self.weights is None and self.gradients is None:
            raise HookConfigError(
                "Shards(weights=None, gradients=None) compresses nothing: leave out shards"
            )
        size = as_python(self.block_size)
        if type(size) is not int or not _UNIT <= size <= _LARGEST_BLOCK or size % _UNIT:
            expected = f"a multiple of {_UNIT} between {_UNIT} and {_LARGEST_BLOCK}"
            raise invalid("Shards: block_size", size, expected)
        nodes = as_python(self.ranks_per_node)
        if not (nodes in ("auto", None) or (type(nodes) is int and nodes >= 1)):
            expected = "'auto', a number of ranks, 1 or more, or None"
            raise invalid("Shards: ranks_per_node", nodes, expected)
        exclude = converted("Shards: exclude", self.exclude, list[str])
        if not all(exclude):
            raise invalid("Shards: exclude", exclude, "patterns that are not empty")
        object.__setattr__(self, "block_size", size)
        object.__setattr__(self, "ranks_per_node", nodes)
        object.__setattr__(self, "exclude", tuple(exclude))

    @property
    def label(self) -> str:
        """What is sent, in a word or two: "int8", or "weights int8, gradients as they are"."""
        if self.weights == self.gradients:
            return str(self.weights)
        return (
            f"weights {self.weights or 'as they are'}, gradients {self.gradients or 'as they are'}"
        )


def shards_of(given: object) -> Shards | None:
    """Check the argument `shards` of the front ends."""
    if given is None or isinstance(given, Shards):
        return given
    if isinstance(given, str) and given in FORMS:
        return Shards(weights=given, gradients=given)
    raise invalid("shards", given, "'int8', 'bf16', commhooks.Shards(...), or None", FORMS)

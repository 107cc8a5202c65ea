"""Define the options of the quantised hooks."""

from dataclasses import dataclass, field
from typing import ClassVar, Union

from commhooks.options import HookConfig

__all__ = ["Int4Compress", "Int8Compress"]

_UNIT = 16
_LARGEST_BLOCK = 2**16


@dataclass(frozen=True, kw_only=True)
class Quantized(HookConfig):
    """Base of the options of both widths; see `Int8Compress`."""

    bits: ClassVar[int]
    start_option: ClassVar[str | None] = "start_iter"

    block_size: int = 256
    use_error_feedback: bool = True
    start_iter: Union[int, float, None] = 0  # noqa: UP007  (OmegaConf 2.4 does not read `int | float | None`)
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = _UNIT <= self.block_size <= _LARGEST_BLOCK and self.block_size % _UNIT == 0
        self._require(
            fits, "block_size", f"a multiple of {_UNIT} between {_UNIT} and {_LARGEST_BLOCK}"
        )


@dataclass(frozen=True, kw_only=True)
class Int8Compress(Quantized):
    """Sends gradients as 8-bit integers with a scale per block.

    It sends about a quarter of the bytes, with error feedback. Vectors and scalars are not
    quantised.

    Args:
        block_size: consecutive elements of a parameter that share a scale of 4 bytes; a multiple of
            16. Smaller blocks are more exact and send more scales.
        use_error_feedback: add the rounding error to the next gradient. Leave it on.
        start_iter: number of steps with plain all-reduce before compression begins (int), or a
            fraction of the run (float between 0 and 1, exclusive). None: 10 % of the run, at most
            1000 steps; 100 steps if the length of the run is unknown.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case-sensitive) that are
            never compressed.
    """

    hook_name: ClassVar[str] = "int8_compress"
    aliases: ClassVar[tuple[str, ...]] = ("int8",)
    bits: ClassVar[int] = 8


@dataclass(frozen=True, kw_only=True)
class Int4Compress(Quantized):
    """Sends gradients as 4-bit integers, two per byte, in smaller blocks.

    It sends about a seventh of the bytes, and rounds more coarsely than int8_compress.

    Args:
        block_size: consecutive elements of a parameter that share a scale of 4 bytes; a multiple of
            16.
        use_error_feedback: add the rounding error to the next gradient. Leave it on.
        start_iter: number of steps with plain all-reduce before compression begins (int), or a
            fraction of the run (float between 0 and 1, exclusive). None: as in `Int8Compress`.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case-sensitive) that are
            never compressed.
    """

    hook_name: ClassVar[str] = "int4_compress"
    aliases: ClassVar[tuple[str, ...]] = ("int4",)
    bits: ClassVar[int] = 4

    block_size: int = 128


COMPRESSOR_PATHS: dict[type[HookConfig], str] = {
    Int8Compress: "commhooks.compressors.quantized.compressor:Int8Compressor",
    Int4Compress: "commhooks.compressors.quantized.compressor:Int4Compressor",
}

"""NeMo-RL's import path for the packers, which live in `nemo_rl.distributed.bin_packing`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.distributed.bin_packing import (
        BinPackingError,
        ConcatenativePacker,
        FirstFitDecreasingPacker,
        FirstFitShufflePacker,
        ModifiedFirstFitDecreasingPacker,
        PackingAlgorithm,
        SequencePacker,
        get_packer,
    )

__all__ = [
    "BinPackingError",
    "ConcatenativePacker",
    "FirstFitDecreasingPacker",
    "FirstFitShufflePacker",
    "ModifiedFirstFitDecreasingPacker",
    "PackingAlgorithm",
    "SequencePacker",
    "get_packer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_rl.distributed import bin_packing

    return getattr(bin_packing, name)

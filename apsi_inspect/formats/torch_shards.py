"""Shards of a PyTorch checkpoint: ``pytorch_model.bin.index.json`` and the files that it names.

Contract as for the other sharded checkpoints (`sharded.py`): the map and the shards' own tables agree, shard names are
plain names in the same folder. `tests/test_torch_files.py` enforces this.
"""

from __future__ import annotations

from ..errors import ModelFileError, quote
from ..model import Finding, ModelFile
from . import torch
from .base import join_columns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..source import ByteSource

ENDINGS = (".bin", ".pt", ".pth")


def read_shards(
    index: ByteSource,
    metadata: dict[str, Any],
    weight_map: dict[str, str],
    open_shard: Callable[[ByteSource, str], ByteSource],
    check_map: Callable[..., list[Finding]],
) -> ModelFile:
    """Open a sharded PyTorch checkpoint by its index.

    Parameters
    ----------
    open_shard, check_map
        `sharded`'s own, which know the rules of an index.
    """
    shards = sorted(set(weight_map.values()))
    sources: list[ByteSource] = []
    models = []
    try:
        for shard in shards:
            sources.append(open_shard(index, shard))
            head = sources[-1].read_at(0, min(512, sources[-1].size))
            if not torch.sniff(head, sources[-1].size):
                raise ModelFileError(index.name, f"shard {quote(shard)} is no PyTorch file")
            models.append(torch.read(sources[-1]))
        names = {shard: list(m.columns.names) for shard, m in zip(shards, models, strict=True)}
        findings = check_map(index, weight_map, names, strict=False)
    except BaseException:
        for source in sources:
            source.close()
        raise
    orders = {m.byte_order for m in models}
    if len(orders) > 1:
        raise ModelFileError(index.name, "its shards are of both byte orders")
    merged: dict[str, Any] = {}
    for m in models:
        merged.update(m.metadata)
    findings += dict.fromkeys(f for m in models for f in m.findings)
    return ModelFile(
        index.name,
        "pytorch",
        join_columns([m.columns for m in models]),
        sources,
        metadata=merged,
        findings=findings,
        facts={"container": "shards", "shards": len(shards), "index metadata": metadata},
        byte_order=orders.pop() if orders else "little",
        views={k: v for m in models for k, v in m.views.items()},
        affine={k: v for m in models for k, v in m.affine.items()},
    )

"""`block-attention-residuals`: attention over depth, over sums of several sub-layers (arXiv 2603.15031)."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from flowscope.merging.connection import ConnectionContext, ModeOptions
from flowscope.merging.depth_attention import AttentionResidualsConnection

BLOCKS = 8
"""So many blocks recover most of the gain in the paper."""


class BlockAttentionOptions(ModeOptions):
    """How the sub-layers are summed."""

    block_size: int | None = Field(None, ge=1, description="sub-layers a block; None: so many that there are 8 blocks")


class BlockAttentionResidualsConnection(AttentionResidualsConnection):
    """As `attention-residuals`, with sums of `block_size` sub-layers as sources: b_0 = x, b_n, and the sum under way.

    Within a block the outputs are added as ever. The first sub-layer of a block reads the finished blocks, the others
    these and the partial sum (section 4). `block_size=1` is `attention-residuals`.
    """

    mode = "block-attention-residuals"
    Options = BlockAttentionOptions

    @staticmethod
    def sites_a_source(context: ConnectionContext, options: Any) -> int:
        """As asked, or an eighth of the sub-layers that streams travel through."""
        return options.block_size or math.ceil(context.between / BLOCKS)

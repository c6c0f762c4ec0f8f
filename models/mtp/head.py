"""An MTP head of any family as a module; see `family` for the formulas.

For a head's caches, the first position that they hold is position 0. This shifts all
positions equally, so no output changes. Positions of committed text need only their
keys and values, so the rest of their forward is never evaluated.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.checkpoints.draft_head import (
    Ends,
    HeadOnTarget,
    HeadOutput,
)
from mlx_speculation.models.introspect.reduced_output import sliced
from mlx_speculation.models.mtp.blocks import Block


class MtpLayer(nn.Module):
    """One layer of a head: a projection and blocks.

    It can have an embedding and an output layer of its own.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        blocks: Sequence[Block],
        *,
        order: str = "embedding_first",
        final: bool = True,  # whether there is a norm after the blocks
        output: int | None = None,  # number of its logits; None: no output layer
        embedding: int | None = None,  # number of its rows; None: no embedding
    ) -> None:
        super().__init__()
        self.norm_e = nn.RMSNorm(dim, eps=eps)
        self.norm_h = nn.RMSNorm(dim, eps=eps)
        self.proj = nn.Linear(2 * dim, dim, bias=False)
        self.blocks = [block.module for block in blocks]
        if final:
            self.final = nn.RMSNorm(dim, eps=eps)
        if output is not None:
            self.output = nn.Linear(dim, output, bias=False)
        if embedding is not None:
            self.embedding = nn.Embedding(embedding, dim)
        self._blocks = tuple(blocks)
        self.order = order

    def new_caches(self) -> list[Any]:
        """Return new caches for the blocks that have one."""
        made = [block.new_cache for block in self._blocks]
        return [make() for make in made if make is not None]

    def joined(self, hidden: mx.array, embedded: mx.array) -> mx.array:
        """Return the first block's input; all arrays are [batch, positions, dim]."""
        pair = [self.norm_e(embedded), self.norm_h(hidden)]
        if self.order == "hidden_first":
            pair.reverse()
        out: mx.array = self.proj(mx.concatenate(pair, axis=-1))
        return out

    def run(self, x: mx.array, caches: Sequence[Any]) -> mx.array:
        """Run the blocks over the next positions, and write these to the caches."""
        remaining = iter(caches)
        for block in self._blocks:
            x = block(x, None if block.new_cache is None else next(remaining))
        return x


class MtpHead(nn.Module):
    """The layers of a head."""

    def __init__(
        self,
        layers: list[MtpLayer],  # one; if chained, one for each drafted token
        convention: MtpConvention,
        *,
        # Whether layer k makes drafted token k; else the first layer makes all of them
        chained: bool = False,
        depth: int | None = None,  # largest number of tokens in a draft; None: any
    ) -> None:
        super().__init__()
        self.layers = layers
        self.convention, self.chained = convention, chained
        self.depth = len(layers) if chained else depth

    def assume(self, convention: MtpConvention) -> None:
        """Use another convention from now on, without changing the weights of norms."""
        self.convention = convention
        for layer in self.layers:
            layer.order = convention.order

    def new_caches(self) -> list[list[Any]]:
        """Return new caches, a list for each layer."""
        return [layer.new_caches() for layer in self.layers]


class Mtp(HeadOnTarget):
    """A head on its target.

    `ends` embeds tokens and makes logits for layers that lack an embedding or an output
    layer. The output layers of the head are cut to the token ids `ids`, uint32 [n]; the
    logits of `ends` must have the same ids. None: all ids.
    """

    def __init__(
        self, head: MtpHead, ends: Ends, *, ids: mx.array | None = None
    ) -> None:
        self.head: MtpHead = head
        self._ends = ends
        outputs: list[nn.Module | None] = [
            layer.output if "output" in layer else None for layer in head.layers
        ]
        if ids is not None:
            outputs = [
                None if layer is None else sliced(layer, ids) for layer in outputs
            ]
        self._outputs = outputs

    @property
    def reads_output(self) -> bool:
        """Return whether a layer makes its logits with `ends`."""
        return None in self._outputs

    def take_output(self, output: nn.Module) -> None:
        """Make logits with this copy of the target's output layer, not with `ends`."""
        self._outputs = [output if kept is None else kept for kept in self._outputs]

    def step(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """See `HeadOnTarget`; here `proj` runs over all positions at once."""
        module = self.head.layers[layer]
        x = self._x(module, hidden, tokens)
        if x.shape[1] > 1:
            module.run(x[:, :-1], caches)  # only its keys and values are evaluated
        return self._output(layer, module.run(x[:, -1:], caches))

    def _run(
        self, layer: int, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        module = self.head.layers[layer]
        return module.run(self._x(module, hidden, tokens), caches)

    def _x(self, layer: MtpLayer, hidden: mx.array, tokens: mx.array) -> mx.array:
        embeds = "embedding" in layer
        embedded = layer.embedding(tokens) if embeds else self._ends.embed(tokens)
        return layer.joined(hidden, embedded)

    def _output(self, layer: int, states: mx.array) -> HeadOutput:
        module, output = self.head.layers[layer], cast("Any", self._outputs[layer])
        normed = module.final(states) if "final" in module else states
        after = self.head.convention.recycled == "after_norm"
        logits = self._ends.head(normed) if output is None else output(normed)
        return HeadOutput(normed if after else states, logits)

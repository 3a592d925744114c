"""What a layout costs each process, from shapes alone: memory, and bytes on the wire. Nothing here needs torch.

The process with the most is counted: rank 0, which holds the larger part wherever something does not divide.

Sources: the parts of layers are those of `distributed.tensor_parallel` (Megatron-LM, arXiv 1909.08053 and 2205.05198);
shards, replicas and when they are gathered are FSDP2's (torch.distributed.fsdp.fully_shard); what a block keeps for
backward is read off `models.decoder`; a ring sends (g - 1)/g of a tensor for a gather or a scatter over g ranks, and
twice that for a sum on all of them (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).
`scripts/study_scaling.py` checks parts, gathered sizes, kept activations and every collective against torch itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

LOGITS_AT_ONCE_BYTES = 2**26
"""`optune.loss.CHUNK_BYTES`."""


class Shape(Protocol):
    """What is read of a `DecoderConfig`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def output_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def query_key_norm(self) -> bool: ...


class Layout(Protocol):
    """What is read of a `distributed.Layout`."""

    @property
    def replicate(self) -> int: ...
    @property
    def shard(self) -> int: ...
    @property
    def tensor(self) -> int: ...


@dataclass(frozen=True)
class Work:
    """What one data rank does in a step, and in which numbers.

    - `rows`, `length`: of one microbatch; `microbatches` a step; `targets` of one microbatch, None: every token.
    - `weight_bytes`: 2 for bf16, 4 for fp32; gradients are as wide. `masters`: fp32 copies of low-precision weights.
    - `states`: tensors that the optimizer keeps for each parameter (AdamW 2), as wide as what it steps.
    - `checkpointing`: blocks keep their input alone.
    """

    rows: int
    length: int
    microbatches: int = 1
    targets: int | None = None
    weight_bytes: int = 2
    masters: bool = True
    states: int = 2
    checkpointing: bool = True

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def reduce_bytes(self) -> int:
        """Width of gradients while they are summed over shards and replicas."""
        return max(self.weight_bytes, 4)


@dataclass(frozen=True)
class Matrix:
    """A parameter as one tensor group's rank holds it before it is sharded; a vector has one column."""

    rows: int
    columns: int
    is_whole: bool
    """Every rank of the tensor group has all of it."""

    def sharded(self, shard: int) -> int:
        """Elements of the largest shard; FSDP2 cuts rows."""
        return math.ceil(self.rows / shard) * self.columns

    def gathered(self, shard: int) -> int:
        """Elements of all shards, padded to one size: what a gather receives."""
        return self.sharded(shard) * shard


def block_parameters(shape: Shape, tensor: int = 1) -> list[Matrix]:
    """The parameters of one block."""
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    splits_keys = shape.num_key_value_heads % tensor == 0
    made = [_by_rows(queries, width, tensor)]
    made += [_by_rows(keys, width, tensor) if splits_keys else Matrix(keys, width, True)] * 2
    made += [_by_columns(width, queries, tensor)]
    if shape.qkv_bias:
        made.append(_by_rows(queries, 1, tensor))
        made += [_by_rows(keys, 1, tensor) if splits_keys else Matrix(keys, 1, True)] * 2
    made += [_by_rows(inner, width, tensor)] * 2 + [_by_columns(width, inner, tensor)]
    if shape.mlp_bias:
        made += [_by_rows(inner, 1, tensor)] * 2
    made += [Matrix(width, 1, True)] * (2 + shape.output_bias + shape.mlp_bias)
    return made + [Matrix(shape.head_dim, 1, True)] * (2 if shape.query_key_norm else 0)


def root_parameters(shape: Shape, tensor: int = 1) -> list[Matrix]:
    """The parameters outside of the blocks: embedding, last norm, and the head where it is not the embedding."""
    words = [_by_rows(shape.vocab_size, shape.hidden_size, tensor)] * (1 if shape.tie_word_embeddings else 2)
    return [*words, Matrix(shape.hidden_size, 1, True)]


def count_parameters(shape: Shape) -> int:
    """All parameters of the model."""
    return sum(matrix.sharded(1) for matrix in _all_parameters(shape, 1))


def flops_per_token(shape: Shape, length: int, *, checkpointing: bool) -> float:
    """Of forward and backward: 6 a weight that is multiplied with, 12 a layer, feature and position seen (causal: half
    of them), as in PaLM's appendix B (arXiv 2204.02311); checkpointing runs the blocks' forward once more."""
    head = shape.vocab_size * shape.hidden_size
    blocks = shape.num_hidden_layers * sum(matrix.sharded(1) for matrix in block_parameters(shape))
    seen = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * length / 2
    forward = 2 * blocks + 4 * seen
    return (4 if checkpointing else 3) * forward + 6 * head


@dataclass(frozen=True)
class Memory:
    """Bytes on the device of one process, part by part.

    - `weights`, `gradients`, `optimizer`: its own part, for the whole run; gradients until the step is over.
    - `gathered`: what FSDP2 holds beside that while a block runs: weights of the root, of the block and of the next
      one, whole gradients of the root and of the block, and the buffers in which a block's gradients are summed.
    - `activations`: what one microbatch keeps for backward. `loss`: logits and the gradients that the loss makes.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        """All at once: an upper bound, because activations are at their peak when gradients begin to come."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.loss


def memory(shape: Shape, layout: Layout, work: Work) -> Memory:
    """What one process needs for a full finetune that steps after backward."""
    width = work.weight_bytes
    held = sum(matrix.sharded(layout.shard) for matrix in _all_parameters(shape, layout.tensor))
    stepped = 4 if work.masters else width
    masters = 4 if work.masters and width < 4 else 0
    return Memory(
        weights=held * width,
        gradients=held * width,
        optimizer=held * (work.states * stepped + masters),
        gathered=_gathered(shape, layout, work),
        activations=activations(shape, layout, work),
        loss=loss_memory(shape, layout, work),
    )


def activations(shape: Shape, layout: Layout, work: Work) -> float:
    """Bytes that one microbatch keeps for backward: all blocks' (their inputs, with checkpointing, and the inside of
    the one that runs), the last norm's, and what stands for the tokens and the rotary tables."""
    inside = block_activations(shape, layout, work)
    layers = shape.num_hidden_layers
    own = work.rows * math.ceil(work.length / layout.tensor)
    kept = layers * own * shape.hidden_size * work.weight_bytes + inside if work.checkpointing else layers * inside
    ids = work.tokens * (8 if layout.tensor == 1 else 9)  # of tokens; and which of them other ranks have
    tables = 2 * work.tokens * shape.head_dim * work.weight_bytes
    return kept + own * shape.hidden_size * work.weight_bytes + ids + tables


def block_activations(shape: Shape, layout: Layout, work: Work) -> float:
    """Bytes that one block keeps for backward, without the rotary tables that all blocks share, and without its input
    where that is kept anyway. A GPU's attention keeps four bytes more a head and position."""
    width, size = work.weight_bytes, layout.tensor
    own = work.rows * math.ceil(work.length / size)
    queries = shape.num_attention_heads // size * shape.head_dim
    keys = max(shape.num_key_value_heads // size, 1) * shape.head_dim
    inner = math.ceil(shape.intermediate_size / size)
    norms = (1 if work.checkpointing else 2) * own * shape.hidden_size * width
    inputs = 2 * work.tokens * shape.hidden_size * width  # of q, k, v and of gate, up: all positions
    attention = work.tokens * (2 * queries + 2 * keys) * width
    if shape.query_key_norm:
        attention += work.tokens * (queries + keys) * width
    # gate, up, and their product, which is made again instead where blocks are not
    return norms + inputs + attention + (3 if work.checkpointing else 2) * work.tokens * inner * width


def loss_memory(shape: Shape, layout: Layout, work: Work) -> float:
    """Bytes of the loss on a device: the targets' hidden states and their gradients, a chunk of logits (as the head
    makes them and in fp32), and the head's gradient, in fp32 while chunks are added up."""
    targets = work.tokens if work.targets is None else work.targets
    words = math.ceil(shape.vocab_size / layout.tensor)
    logits = min(targets * words, max(LOGITS_AT_ONCE_BYTES // work.weight_bytes, words))
    return (
        2 * targets * shape.hidden_size * work.weight_bytes
        + logits * (work.weight_bytes + 4)
        + words * shape.hidden_size * 4
    )


@dataclass(frozen=True)
class Collective:
    """Calls of one kind in a step: `bytes` is the size of what is gathered, scattered or summed, over all calls."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    over: Literal["shard", "replicate", "tensor"]
    bytes: float

    def on_the_wire(self, ranks: int) -> float:
        """Bytes that each of `ranks` processes sends, in a ring."""
        return self.bytes * (ranks - 1) / ranks * (2 if self.kind == "all_reduce" else 1)


def traffic(shape: Shape, layout: Layout, work: Work) -> list[Collective]:
    """What a step sends, kind by kind. Left out: a few numbers for counts, loss and norm."""
    return [collective for collective in _traffic(shape, layout, work) if collective.bytes]


def bytes_on_the_wire(shape: Shape, layout: Layout, work: Work) -> dict[str, float]:
    """Bytes that each process sends in a step, by dimension of the mesh."""
    sent = {"shard": 0.0, "replicate": 0.0, "tensor": 0.0}
    for collective in traffic(shape, layout, work):
        sent[collective.over] += collective.on_the_wire(getattr(layout, collective.over))
    return sent


def _traffic(shape: Shape, layout: Layout, work: Work) -> Iterator[Collective]:
    blocks, root = block_parameters(shape, layout.tensor), root_parameters(shape, layout.tensor)
    layers, times = shape.num_hidden_layers, work.microbatches
    block = sum(matrix.gathered(layout.shard) for matrix in blocks)
    rest = sum(matrix.gathered(layout.shard) for matrix in root)
    if layout.shard > 1:
        # Blocks are gathered in forward and again in backward, the root once for both.
        yield Collective("all_gather", "shard", times * (2 * layers * block + rest) * work.weight_bytes)
        yield Collective("reduce_scatter", "shard", times * (layers * block + rest) * work.reduce_bytes)
    if layout.replicate > 1:
        shards = (layers * block + rest) / layout.shard
        yield Collective("all_reduce", "replicate", times * shards * work.reduce_bytes)
    if layout.tensor > 1:
        yield from _tensor_traffic(shape, work, [*blocks * layers, *root])


def _tensor_traffic(shape: Shape, work: Work, parameters: Sequence[Matrix]) -> Iterator[Collective]:
    """A block gathers positions twice and scatters sums twice, in forward and in backward; run again for backward, it
    stops before its last scatter. The embedding scatters and the last norm gathers, and the reverse in backward."""
    hidden, layers = work.tokens * shape.hidden_size * work.weight_bytes, shape.num_hidden_layers
    gathers, scatters = (6, 5) if work.checkpointing else (4, 4)
    yield Collective("all_gather", "tensor", work.microbatches * (gathers * layers + 2) * hidden)
    yield Collective("reduce_scatter", "tensor", work.microbatches * (scatters * layers + 2) * hidden)
    targets = work.tokens if work.targets is None else work.targets
    whole = sum(matrix.rows * matrix.columns for matrix in parameters if matrix.is_whole)
    yield Collective("all_reduce", "tensor", work.microbatches * (whole * work.weight_bytes + 3 * 4 * targets))


def _gathered(shape: Shape, layout: Layout, work: Work) -> float:
    if layout.shard * layout.replicate == 1:
        return 0.0
    block = sum(matrix.gathered(layout.shard) for matrix in block_parameters(shape, layout.tensor))
    root = sum(matrix.gathered(layout.shard) for matrix in root_parameters(shape, layout.tensor))
    weights = (root + 2 * block) * work.weight_bytes if layout.shard > 1 else 0
    return weights + (root + block) * work.weight_bytes + block * work.reduce_bytes


def _all_parameters(shape: Shape, tensor: int) -> list[Matrix]:
    return block_parameters(shape, tensor) * shape.num_hidden_layers + root_parameters(shape, tensor)


def _by_rows(rows: int, columns: int, tensor: int) -> Matrix:
    return Matrix(math.ceil(rows / tensor), columns, tensor == 1)


def _by_columns(rows: int, columns: int, tensor: int) -> Matrix:
    return Matrix(rows, math.ceil(columns / tensor), tensor == 1)

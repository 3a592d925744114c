"""Tensor parallelism for the decoder: every rank of a tensor group holds a part of each layer and computes with it.

What is split follows Megatron-LM (arXiv 1909.08053) and its sequence parallelism (arXiv 2205.05198), on DTensors:

| layer | this rank holds | gradients of |
|---|---|---|
| q, k, v, gate, up | rows of the weight: its own heads, its own inner features | its part |
| o, down | columns of the weight, and the bias | its part; the bias is summed over ranks |
| embedding, head | its own words | its part |
| norms | the whole weight | summed over ranks |
| lora_A, lora_B of a layer split by rows | all of A, rows of B | A is summed over ranks |
| lora_A, lora_B of a layer split by columns | columns of A, all of B | B is summed over ranks |

Between the layers each rank holds a part of the positions, as a DTensor that knows how many there are, so any length
goes: attention and MLP gather the positions when they begin and scatter their sums when they end. That is all that
goes over the wire in a block, forward and backward; attention, norms and the MLP run on plain local tensors. So every
parameter that a rank holds whole has met a part of the positions, heads or features alone, and the gradients of all
ranks are its sum.

Parts need not be equal, except that heads are whole: torch cuts 10 rows for 4 ranks into 3, 3, 3, 1.

Shapes: B rows, T positions, D hidden_size, V vocabulary; R rank of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from optune import kernels
from optune.errors import ConfigError
from optune.types import PackedWeight

_WHOLE, _ROWS, _COLUMNS = Replicate(), Shard(0), Shard(1)
Placements = Mapping[str, Placement]
BY_ROWS: Placements = {"weight": _ROWS, "bias": _ROWS, "lora_A.weight": _WHOLE, "lora_B.weight": _ROWS}
"""How the parameters of a linear layer are split whose output features are divided among the ranks."""
BY_COLUMNS: Placements = {"weight": _COLUMNS, "bias": _WHOLE, "lora_A.weight": _COLUMNS, "lora_B.weight": _WHOLE}
"""The same where the input features are divided."""
WHOLE: Placements = dict.fromkeys(BY_ROWS, _WHOLE)


def apply(model: Any, mesh: DeviceMesh) -> None:
    """Splits a Decoder over the ranks of `mesh` (one dimension), in place; every parameter becomes a DTensor on it.

    Each rank keeps its part of the values that it has, so all must have the same; on the meta device nothing is
    allocated. Adapters are in place by then; FSDP, steppers and optimizers come afterwards. Names stay. Tokens and
    losses are the same on all ranks of the group; `hidden` gives all of them the whole hidden_BTD, `next_token_loss`
    takes the head's parts as they are, and `forward` gathers the logits.

    Raises ConfigError where the model cannot be split (see `check`), or has a parameter that no rule above places.
    """
    if mesh.size() == 1:
        return
    check(model.config, mesh.size())
    if packed := [name for name, module in model.named_modules() if isinstance(module, PackedWeight)]:
        raise ConfigError(
            f"{packed[0]} is quantized, and codes that share a scale cannot be split by rows and columns",
            where="parallel.tensor",
            hint="use parallel.tensor=1 (parallel.shard divides any model), or lora.quantize_base=null",
        )
    group = _Group(mesh, model.config)
    group.embedding(model.model.embed_tokens)
    for block in model.blocks:
        group.norm(block.input_layernorm)
        group.attention(block.self_attn)
        group.norm(block.post_attention_layernorm)
        group.mlp(block.mlp)
    group.final_norm(model.model.norm)
    group.head(model.lm_head)
    model.register_forward_hook(lambda _module, _inputs, logits_BTV: logits_BTV.full_tensor())
    model.cached_heads = max(model.config.num_key_value_heads // mesh.size(), 1)
    model.compile_blocks = partial(_compile_apart, model)
    if strangers := [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]:
        raise ConfigError(
            f"no rule says how to split {', '.join(strangers[:3])} of {model.config.model_type}",
            where="parallel.tensor",
            hint="use parallel.tensor=1; parallel.shard divides any model",
        )


def _compile_apart(model: Any, **options: Any) -> None:
    """Compiles each block in place, each with a store of its own for what torch makes; unless there is nothing to gain.

    Otherwise blocks share one store, where plain blocks find each other's code. Blocks that are split do not (each has
    functions of its own as `forward`), and torch gives up after eight entries. Eight for each block is what is left.
    """
    if kernels.are_all_there_is(model.model.norm.weight) and not options:
        model.compilation = kernels.NOTHING_TO_COMPILE
        return
    import torch._functorch.config as storing

    # It cannot store code that holds a mesh, and would say so for every block.
    storing.enable_autograd_cache = False
    limits: Any = torch._dynamo.config
    needed = len(model.blocks) * limits.recompile_limit
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, needed)
    for block in model.blocks:
        block.compile(isolate_recompiles=True, **options)


def check(config: Any, size: int) -> None:
    """Raises ConfigError with every number of `config` that cannot be split over `size` ranks."""
    if size == 1:
        return
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    problems = []
    if heads % size:
        problems.append(f"num_attention_heads is {heads}")
    if key_value_heads % size and size % key_value_heads:
        problems.append(f"num_key_value_heads is {key_value_heads}, neither a multiple nor a divisor")
    for key in ("intermediate_size", "vocab_size"):
        width = getattr(config, key)
        if (size - 1) * math.ceil(width / size) >= width:
            problems.append(f"{key} is {width}, which leaves a rank without any")
    if problems:
        fits = [
            str(n) for n in range(1, heads + 1) if heads % n == 0 and not (key_value_heads % n and n % key_value_heads)
        ]
        raise ConfigError(
            f"this {config.model_type} model cannot be split over {size} ranks: {'; '.join(problems)}",
            where="parallel.tensor",
            hint=f"its heads divide by {', '.join(fits)}; parallel.shard divides any model",
        )


class _Group:
    """The ranks that share a model, and this one's place: turns modules into their parts, one method a kind."""

    def __init__(self, mesh: DeviceMesh, config: Any) -> None:
        self.mesh, self.config = mesh, config
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self._placed: dict[int, nn.Parameter] = {}
        """By the identity of the parameter before: one that two modules share stays shared."""

    def attention(self, module: Any) -> None:
        shared_by = self.size // self.config.num_key_value_heads  # ranks that need the same key head
        self._linear(module.q_proj, BY_ROWS)
        for projection in (module.k_proj, module.v_proj):
            if shared_by <= 1:
                self._linear(projection, BY_ROWS)
            else:
                start = self.rank // shared_by * module.head_dim
                self._linear(projection, WHOLE, rows=slice(start, start + module.head_dim))
        for norm in (module.q_norm, module.k_norm):
            if norm is not None:
                self._linear(norm, WHOLE)
        self._sum_output(module.o_proj)
        self._gather_input(module)

    def mlp(self, module: Any) -> None:
        self._linear(module.gate_proj, BY_ROWS)
        self._linear(module.up_proj, BY_ROWS)
        self._sum_output(module.down_proj)
        self._gather_input(module)

    def norm(self, module: Any) -> None:
        self._linear(module, WHOLE)
        plain = module.forward

        def forward(hidden_BTD: DTensor) -> DTensor:
            normed = plain(hidden_BTD.to_local())
            return self._as_part(normed, Shard(1), hidden_BTD.shape)

        module.forward = forward

    def final_norm(self, module: Any) -> None:
        self.norm(module)
        by_parts = module.forward
        # A copy, because FSDP2 hangs its hooks on what a forward pass returns, and a view may lose them.
        module.forward = lambda hidden_BTD: _gather(by_parts(hidden_BTD)).clone()

    def embedding(self, module: Any) -> None:
        self._place(module, {"weight": _ROWS})
        mine = self._part_of(module.num_embeddings)
        padding = module.padding_idx
        padding = padding - mine.start if padding is not None and mine.start <= padding < mine.stop else None

        def forward(tokens_BT: Tensor) -> DTensor:
            elsewhere_BT = (tokens_BT < mine.start) | (tokens_BT >= mine.stop)
            rows_BT = (tokens_BT - mine.start).masked_fill(elsewhere_BT, 0)
            found_BTD = F.embedding(rows_BT, module.weight.to_local(), padding)
            return self._scatter(found_BTD.masked_fill(elsewhere_BT[..., None], 0))

        module.forward = forward

    def head(self, module: Any) -> None:
        """Gives logits_BTV as a DTensor of which each rank holds its own words."""
        self._linear(module, BY_ROWS)
        by_parts = module.forward

        def forward(hidden_BTD: Tensor) -> DTensor:
            return self._as_part(
                by_parts(hidden_BTD), Shard(hidden_BTD.ndim - 1), (*hidden_BTD.shape[:-1], module.out_features)
            )

        module.forward = forward

    def _sum_output(self, module: Any) -> None:
        """A layer split by columns: each rank has a summand of the output, and keeps the sum for its positions."""
        self._linear(module, BY_COLUMNS)
        if hasattr(module, "lora_A"):
            module.input_part = self._part_of(module.in_features)
        summand = module.forward
        module.forward = lambda input_BTI: self._scatter(summand(input_BTI))

    def _gather_input(self, module: Any) -> None:
        plain = module.forward
        module.forward = lambda hidden_BTD, *rest: plain(_gather(hidden_BTD), *rest)

    def _linear(self, module: Any, placements: Placements, rows: slice | None = None) -> None:
        """`module.forward` computes with this rank's part; of a whole weight, with the output features `rows`."""
        self._place(module, placements)
        plain = module.forward
        counts_bias = placements is not BY_COLUMNS or self.rank == 0

        def forward(*inputs: Tensor) -> Tensor:
            with _parts(module, rows, counts_bias):
                return plain(*inputs)

        module.forward = forward

    def _place(self, module: nn.Module, placements: Placements) -> None:
        for path, parameter in list(module.named_parameters()):
            if path not in placements:
                continue
            if id(parameter) not in self._placed:
                part = distribute_tensor(parameter.detach(), self.mesh, [placements[path]], src_data_rank=None)
                self._placed[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            owner, _, name = path.rpartition(".")
            module.get_submodule(owner).register_parameter(name, self._placed[id(parameter)])

    def _part_of(self, count: int) -> slice:
        """Which of `count` rows or columns this rank holds: torch cuts as `torch.chunk` does."""
        largest = math.ceil(count / self.size)
        return slice(min(self.rank * largest, count), min((self.rank + 1) * largest, count))

    def _scatter(self, summand_BTD: Tensor) -> DTensor:
        """The sum over ranks of `summand_BTD`, of which each keeps its positions."""
        return DTensor.from_local(summand_BTD, self.mesh, [Partial()], run_check=False).redistribute(
            placements=[Shard(1)]
        )

    def _as_part(self, part: Tensor, placement: Placement, shape: Any) -> DTensor:
        shape = torch.Size(shape)
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return DTensor.from_local(part, self.mesh, [placement], run_check=False, shape=shape, stride=strides)


def _gather(hidden_BTD: DTensor) -> Tensor:
    """All positions; each rank's gradient is a summand of the whole one."""
    return hidden_BTD.redistribute(placements=[_WHOLE]).to_local(grad_placements=[Partial()])


@contextmanager
def _parts(module: nn.Module, rows: slice | None, counts_bias: bool) -> Iterator[None]:
    """Shows `module` this rank's part of each of its parameters as plain tensors, which lead gradients back to them."""
    held = [
        (owner, name, path, parameter)
        for path_to, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        for path in [f"{path_to}.{name}" if path_to else name]
        if parameter is not None
    ]
    try:
        for owner, name, path, parameter in held:
            part = _part(parameter)
            if rows is not None and path != "lora_A.weight":
                part = part[rows]
            if path == "bias" and not counts_bias:
                part = part * 0
            owner._parameters[name] = part  # pyright: ignore
        yield
    finally:
        for owner, name, _, parameter in held:
            owner._parameters[name] = parameter


def _part(parameter: Any) -> Tensor:
    """This rank's part. A parameter that is whole on every rank has gradients to be summed over them."""
    if parameter.placements == (_WHOLE,):
        return parameter.redistribute(placements=[_WHOLE]).to_local(grad_placements=[Partial()])
    return parameter.to_local()

#!/usr/bin/env python
"""Checks on a CUDA device what the tests can only check the logic of: python scripts/check_gpu.py

- every stash policy ends bitwise where the update after backward ends, and rounding by chance is that of a CPU;
- `cpu` moves gradients to pinned host memory, and it, `alias` and unclipped in-backward lower the peak;
- norms do not depend on the grouping of gradients; Gram norms in low precision are right;
- state saved by another implementation is placed where the fused step needs it;
- rows in a pack are what they are alone;
- `activation_offloading` changes no gradient, lowers the peak, and takes less time than torch's `save_on_cpu`;
- a base in NF4 has the codes that it has on a CPU;
- `parallel.offload` keeps weights, gradients and optimizer state in pinned host memory, ends where the device alone
  ends, and in backward bitwise where it ends after backward.

Prints a line a check. Exit code: 0 all hold, 1 one does not, 2 there is no CUDA device.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optune import distributed, lora, models, optim, shards
from optune.loss import next_token_loss
from optune.models.families import read_config
from optune.models.offloading import CudaCopies, Offloading
from optune.optim.norms import parameter_norms
from optune.optim.rounding import Rounding, draw, round_
from optune.optim.stash.factors import LinearFactors, gram_norms
from optune.train import train_step
from optune.types import Microbatch

WIDTH, INNER, BLOCKS = 2048, 5504, 8


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Stack(nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = INNER, blocks: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(blocks)])

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def build(model: nn.Module, when: str, masters: str = "none", **settings: Any) -> tuple[Any, Any]:
    keep = {"update_rounding": masters} if masters == "stochastic" else {"master_weights": masters}
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-3}, **keep
    )
    return optimizer, optim.build_stepper(model, optimizer, when=when, **settings)


def train(model: nn.Module, stepper: Any, rows: list[Tensor], microbatches: int = 1) -> list[Any]:
    """A step for each tensor of `rows`."""
    stats = []
    for row in rows:
        for pass_index in range(stepper.passes):
            for index, part in enumerate(row.chunk(microbatches)):
                with stepper.microbatch(index == microbatches - 1, pass_index):
                    model(part).float().square().mean().backward()
        stats.append(stepper.finish())
    return stats


def check_policies_are_bitwise(device: torch.device, scale: int = 1) -> str:
    """Weights, state and norms after three clipped steps, for fp32, for bf16 with masters and rounded by chance."""
    cases = [
        (torch.float32, "none", ("hold", "cpu", "two_pass")),
        (torch.bfloat16, "fp32", ("hold", "cpu", "two_pass", "alias")),
        (torch.bfloat16, "stochastic", ("hold", "cpu", "two_pass")),
    ]
    for dtype, masters, policies in cases:
        rows = [torch.randn(64, WIDTH // scale, device=device).to(dtype) for _ in range(3)]
        outcomes = []
        for policy in (None, *policies):
            model = Stack(WIDTH // scale, INNER // scale, 3).to(device, dtype)
            when = "after_backward" if policy is None else "in_backward"
            optimizer, stepper = build(model, when, masters, max_grad_norm=1e-3, stash=policy or "auto")
            stats = train(model, stepper, rows, microbatches=2)
            states = [optimizer.state[held] for group in optimizer.param_groups for held in group["params"]]
            tensors = [*model.parameters(), *(value for state in states for value in state.values())]
            outcomes.append((policy, stats, [tensor.detach().cpu() for tensor in tensors]))
        _, expected_stats, expected = outcomes[0]
        for policy, stats, got in outcomes[1:]:
            assert stats == expected_stats, f"{policy} ({dtype}): {stats} instead of {expected_stats}"
            same = all(torch.equal(left, right) for left, right in zip(expected, got, strict=True))
            assert same, f"{policy} ({dtype}): weights or state differ"
    return "fp32, bf16 with masters, and bf16 rounded stochastically"


def check_rounding(device: torch.device) -> str:
    """Random bits, and what is rounded by them, are those of a CPU; NaN of a GPU's making stays NaN."""
    values = torch.randn(2**18 + 1, generator=torch.Generator().manual_seed(0))
    values[:1000] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    outcomes = []
    for where in (torch.device("cpu"), device):
        rounded = values.to(where, copy=True)
        for first, bits in draw(rounded, Rounding("weight", 0).keys(3)):
            round_(rounded[first : first + len(bits)], bits)
        outcomes.append(rounded.cpu())
    assert all(bool(rounded[:1000].isnan().all()) for rounded in outcomes), "NaN became a number"
    assert torch.equal(outcomes[0][1000:], outcomes[1][1000:]), "the device rounds otherwise than the CPU"
    return f"{len(values):,} numbers"


def measure_peak(
    device: torch.device, policy: str | None, clip: float | None, masters: str = "none"
) -> tuple[int, float, Any]:
    """Peak bytes above weights and state in a step of few tokens, seconds a step, and the stepper."""
    model = Stack().to(device, torch.bfloat16)
    when = "after_backward" if policy is None else "in_backward"
    _, stepper = build(model, when, masters, max_grad_norm=clip, stash=policy or "auto")
    rows = [torch.randn(16, WIDTH, device=device, dtype=torch.bfloat16)]
    train(model, stepper, rows * 2)  # the first steps make state and buffers
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        train(model, stepper, rows)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return torch.cuda.max_memory_allocated(device) - before, statistics.median(times), stepper


def check_peaks(device: torch.device) -> str:
    """Few tokens and wide layers: gradients make the peak, and each policy lowers it as it says."""
    gradients = sum(p.numel() for p in Stack().parameters()) * 2
    hold, hold_s, _ = measure_peak(device, "hold", 1e-3)
    cpu, cpu_s, stepper = measure_peak(device, "cpu", 1e-3)
    unclipped, _, _ = measure_peak(device, "auto", None)
    masters, _, _ = measure_peak(device, "hold", 1e-3, "fp32")
    alias, _, _ = measure_peak(device, "alias", 1e-3, "fp32")
    factored, _, _ = measure_peak(device, "factored", 1e-3)
    buffers = list(stepper._stash._mover._buffers.values())
    assert buffers and all(buffer.is_pinned() for buffer in buffers), "cpu: no pinned buffer was used"
    figures = {
        "hold": hold,
        "cpu": cpu,
        "unclipped": unclipped,
        "hold with masters": masters,
        "alias": alias,
        "factored": factored,
    }
    line = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in figures.items())
    line += f" (gradients {gradients / 2**20:.0f} MiB); cpu takes {cpu_s / hold_s:.2f} x the time of hold"
    assert hold >= 0.9 * gradients, line
    assert cpu <= hold - 0.5 * gradients, line
    assert unclipped <= hold - 0.7 * gradients, line
    assert alias <= masters - 0.7 * gradients, line
    assert factored <= hold - 0.5 * gradients, line
    return line


def check_norms(device: torch.device) -> str:
    """Each norm is the same bits alone and in company, and right."""
    for dtype in (torch.float32, torch.bfloat16):
        gradients = [torch.randn(size, device=device).to(dtype) for size in (5, 4097, 1 << 20, (1 << 24) + 3)]
        together = parameter_norms(gradients)
        for norm, gradient in zip(together, gradients, strict=True):
            assert torch.equal(norm, parameter_norms([gradient])[0]), f"{dtype}: depends on the company"
            exact = float(gradient.double().norm())
            assert abs(float(norm) - exact) < 1e-5 * exact, f"{dtype}: {float(norm)} instead of {exact}"
    return "fp32 and bf16"


def check_gram_norms(device: torch.device) -> str:
    """Gram matrices of bf16 factors, taken with fp32 output."""
    inputs, outputs = (torch.randn(700, width, device=device, dtype=torch.bfloat16) for width in (512, 1024))
    factors = LinearFactors()
    factors.add(inputs, outputs)
    exact = float((outputs.double().t() @ inputs.double()).norm())
    got = float(gram_norms([factors])[0])
    assert abs(got - exact) < 1e-4 * exact, f"{got} instead of {exact}"
    return f"relative error {abs(got - exact) / exact:.1e}"


def check_state_is_placed(device: torch.device) -> str:
    """A state dict from a loop optimizer keeps its step counts on the host; the fused one needs them on the device."""
    model = Stack(64, 128, 2).to(device)
    loop = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    model(torch.randn(4, 64, device=device)).square().mean().backward()
    loop.step()
    loop.zero_grad()
    fused, stepper = build(model, "in_backward", max_grad_norm=1.0)
    fused.load_state_dict(
        loop.state_dict() | {"param_groups": [dict(fused.state_dict()["param_groups"][0], fused=False, foreach=False)]}
    )
    assert fused.param_groups[0]["fused"] is True
    train(model, stepper, [torch.randn(4, 64, device=device)])
    return "the fused step runs on it"


DECODER = {"model_type": "llama", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816,
           "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
           "hidden_act": "silu", "max_position_embeddings": 512, "tie_word_embeddings": False,
           "architectures": ["LlamaForCausalLM"]}  # fmt: skip


def train_decoder(device: torch.device, when: str, *, offload: bool, scale: int = 1) -> tuple[list[Tensor], int, bool]:
    """Three clipped steps of two microbatches: weights and momentum, the most memory in use on the device in the last
    one, and whether all that is kept lies in host memory, pinned where there is a device."""
    narrow = {"hidden_size": 1024 // scale, "intermediate_size": 2816 // scale, "num_hidden_layers": max(2, 8 // scale)}
    config, problems = read_config(DECODER | narrow)
    assert config is not None, problems
    with distributed.start(str(device), offload=offload) as processes:
        model = models.outline(config)
        distributed.spread(model, processes)
        shards.materialize(model, processes.parameter_device)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            part = shards.local_values(parameter)
            part.copy_(torch.randn(part.shape) * 0.05 + name.endswith("norm.weight"))
        settings = {"lr": 0.1, "momentum": 0.9}  # not Adam: it makes much of gradients that are mostly rounding
        optimizer = optim.build_optimizer(model.named_parameters(), factory=torch.optim.SGD, settings=settings)
        stepper = optim.build_stepper(model, optimizer, when=when, max_grad_norm=0.5)
        for step in range(3):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            rows = torch.randint(0, 8192, (2, 2, 65), generator=torch.Generator().manual_seed(step))
            positions_BT = torch.arange(64).repeat(2, 1)
            parts = [Microbatch(part[:, :-1], part[:, 1:].contiguous(), positions_BT, num_tokens=128) for part in rows]
            train_step(model, next_token_loss, stepper, parts, seed=0, step=step)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        kept = [*model.parameters(), *(optimizer.state[each]["momentum_buffer"] for each in model.parameters())]
        locals_ = [shards.local_values(each) for each in kept]
        is_home = all(each.device.type == "cpu" for each in locals_)
        if device.type == "cuda" and is_home:
            is_home = all(shards.local_values(each).is_pinned() for each in model.parameters())
        return [each.cpu().clone() for each in locals_], peak, is_home


def check_offload(device: torch.device, scale: int = 1) -> str:
    """Weights in host memory: the same training, on less of the device."""
    alone, peak_alone, _ = train_decoder(device, "after_backward", offload=False, scale=scale)
    after, peak, is_home = train_decoder(device, "after_backward", offload=True, scale=scale)
    inside, _, is_home_too = train_decoder(device, "in_backward", offload=True, scale=scale)
    assert is_home and is_home_too, "weights or momentum are on the device, or not pinned"
    assert all(map(torch.equal, after, inside)), "in backward does not end where after backward ends"
    apart = max(float((one - other).norm() / one.norm()) for one, other in zip(alone, after, strict=True))
    assert apart < 1e-5, f"{apart:.1e} from the training on the device"
    if device.type == "cuda":
        kept = sum(each.nbytes for each in alone)
        assert peak < peak_alone - 0.7 * kept, f"peak {peak} of {peak_alone}, of which {kept} are weights and momentum"
    return f"relative difference {apart:.1e}, peak {peak_alone / 2**20:.0f} -> {peak / 2**20:.0f} MiB"


def check_packs(device: torch.device) -> str:
    """Rows in a pack, by the kernel for several lengths on CUDA, have the hidden states that they have alone, and the
    same gradient for the embedding; in bf16, both against the model in fp32."""
    narrow = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2}  # fmt: skip
    config, problems = read_config(DECODER | narrow)
    assert config is not None, problems
    torch.manual_seed(0)
    exact = models.Decoder(config).to(device)
    model = models.Decoder(config).to(device)
    model.load_state_dict(exact.state_dict())
    model.to(torch.bfloat16)
    lengths = (180, 1, 75, 256)
    rows = [torch.randint(0, 8192, (1, length), device=device) for length in lengths]
    documents_BT = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(device)
    positions_BT = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    pack = (torch.cat(rows, dim=1), positions_BT, documents_BT)

    def errors(hidden_BTD: Tensor, weight: Tensor) -> list[float]:
        hidden_BTD.float().square().sum().backward()
        assert weight.grad is not None
        pairs = ((hidden_BTD, truth[0]), (weight.grad, truth[1]))
        return [float((mine.detach().float() - true).norm() / true.norm()) for mine, true in pairs]

    expected_BTD = torch.cat([exact.hidden(row) for row in rows], dim=1)
    expected_BTD.square().sum().backward()
    truth = (expected_BTD.detach(), exact.model.embed_tokens.weight.grad)
    packed = errors(model.hidden(*pack), model.model.embed_tokens.weight)
    model.zero_grad()
    alone = errors(torch.cat([model.hidden(row) for row in rows], dim=1), model.model.embed_tokens.weight)
    line = f"error {packed[0]:.4f} and {packed[1]:.4f}, of rows alone {alone[0]:.4f} and {alone[1]:.4f}"
    assert all(one <= 1.3 * other for one, other in zip(packed, alone, strict=True)), line
    return line


def differentiate(model: Any, rows: Tensor, around: Any = nullcontext) -> tuple[list[Tensor], int, float]:
    """Gradients, the most memory in use on the device, and seconds, of the third of three passes."""
    device, peak, seconds = rows.device, 0, 0.0
    for _ in range(3):
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        with around():
            hidden_BTD = model.hidden(rows)
        hidden_BTD.float().square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device)
        seconds = time.perf_counter() - start
    return [each.grad.clone() for each in model.parameters() if each.grad is not None], peak, seconds


def check_offloaded_activations(device: torch.device, scale: int = 1, copies: Any = None) -> str:
    """Activations in host memory: the same gradients bit for bit, on less of the device, in less time than torch's."""
    narrow = {"hidden_size": 1024 // scale, "intermediate_size": 2816 // scale, "max_position_embeddings": 4096}
    config, problems = read_config(DECODER | narrow)
    assert config is not None, problems
    model = models.outline(config).to(torch.bfloat16).to_empty(device=device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rows = torch.randint(0, 8192, (4, 2048 // scale), device=device)
    is_cuda = device.type == "cuda"
    plain, most, plain_s = differentiate(model, rows)
    simple = partial(torch.autograd.graph.save_on_cpu, pin_memory=is_cuda)
    _, _, simple_s = differentiate(model, rows, simple)
    model.offloading = Offloading(CudaCopies(device) if copies is None else copies)
    offloaded, least, offloaded_s = differentiate(model, rows)
    assert all(map(torch.equal, plain, offloaded)), "gradients differ"
    line = f"peak {most / 2**20:.0f} -> {least / 2**20:.0f} MiB, {offloaded_s / plain_s:.2f} x the time"
    line += f" (save_on_cpu {simple_s / plain_s:.2f} x)"
    if is_cuda:
        assert least < 0.6 * most, line
        assert offloaded_s < simple_s, line
    return line


def check_quantized_base(device: torch.device) -> str:
    """A base in NF4: codes, outputs and gradients of the CPU's."""
    weight, rows = torch.randn(1024, 2048) * 0.03, torch.randn(64, 2048)
    found: list[tuple[Any, Tensor, Tensor]] = []
    for place in (torch.device("cpu"), device):
        layer = lora.Nf4Linear(nn.Linear(2048, 1024, bias=False))
        layer.weight.to_empty(device=place).pack(weight)
        inputs = rows.to(place).requires_grad_()
        outputs = layer(inputs)
        outputs.sum().backward()
        assert inputs.grad is not None
        found.append((layer.weight.packed, outputs.detach().cpu(), inputs.grad.cpu()))
    (packed, *wanted), (others, *got) = found
    for mine, theirs in zip(packed, others, strict=True):
        same = torch.isclose(mine, theirs.cpu(), rtol=1e-6) if mine.is_floating_point() else mine == theirs.cpu()
        assert same.float().mean() > 0.9999, "codes or scales differ from the CPU's"
    apart = max(float((one - other).norm() / one.norm()) for one, other in zip(wanted, got, strict=True))
    assert apart < 1e-2, f"outputs or gradients differ by {apart:.1e}"
    return f"relative difference {apart:.1e}"


CHECKS: list[Callable[[torch.device], str]] = [
    check_policies_are_bitwise,
    check_rounding,
    check_norms,
    check_gram_norms,
    check_state_is_placed,
    check_peaks,
    check_offload,
    check_packs,
    check_offloaded_activations,
    check_quantized_base,
]


def main() -> int:
    if not torch.cuda.is_available():
        print("error: no CUDA device here, nothing was checked", file=sys.stderr)
        print("hint: run this on a machine with an NVIDIA GPU and a CUDA build of torch", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    torch.use_deterministic_algorithms(True, warn_only=True)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    failed = 0
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            print(f"ok      {name}: {check(device)}")
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}")
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

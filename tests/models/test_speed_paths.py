"""Nothing that makes a step faster or leaner changes a loss: each path on and off, step by step."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from optune import loss, models, optim, train
from optune.types import IGNORE, Microbatch
from tests import fixtures


def plain_norm(hidden, weight, eps):
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(hidden.dtype)


def plain_loss(model, hidden_BTD, microbatch):
    """All logits at once, and torch's own cross-entropy."""
    logits_BTV = model.lm_head(hidden_BTD).float()
    labels_N = microbatch.labels_BT.flatten()
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_N, ignore_index=IGNORE, reduction="sum")


PATHS = ["kernels", "tiles", "norms", "gate", "remade", "fused loss", "small parts", "all"]


def turn_off(path: str, patch: pytest.MonkeyPatch) -> None:
    if path in ("kernels", "all"):
        patch.setattr("optune.kernels._is_off", True)
    if path in ("tiles", "all"):
        patch.setattr("optune.models.decoder._is_tiled", lambda *_: False)
    if path in ("norms", "all"):
        patch.setattr("optune.models.decoder.rms_norm", plain_norm)
    if path in ("gate", "all"):
        patch.setattr("optune.models.decoder.swiglu", lambda gate, up, **_: F.silu(gate) * up)
    if path in ("remade", "all"):
        patch.setattr("optune.models.decoder.remaking", lambda *_: nullcontext())
    if path == "small parts":
        patch.setattr("optune.cross_entropy.PART_ON_CPU", 2**40)
        patch.setattr("optune.loss.CHUNK_BYTES", 2**40)


def run(folder: Path, dtype: torch.dtype, off: str | None = None, setting: str | None = None) -> list[float]:
    """Losses of six steps: rows of 70 and 40 tokens, then a pack of four."""
    torch.manual_seed(0)
    model = models.load(folder, dtype=dtype)
    if setting in ("selective", "block"):
        model.activation_checkpointing = setting
    if setting == "compile":
        model.compile_blocks(options={"fallback_by_default": True})  # no loops in C++, which take their time
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 0.1, "momentum": 0.9}
    )
    stepper = optim.build_stepper(model, optimizer, when="after_backward", max_grad_norm=1.0)
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optune.loss.CHUNK_BYTES", 100 * model.config.vocab_size)  # several chunks of several parts
        patch.setattr("optune.cross_entropy.PART_ON_CPU", 7 * model.config.vocab_size)
        turn_off(off or "", patch)
        for step in range(6):
            tokens_BT = torch.randint(
                0, model.config.vocab_size, (2, 70), generator=torch.Generator().manual_seed(step)
            )
            labels_BT = tokens_BT.roll(-1, 1)
            labels_BT[1, 40:] = IGNORE
            positions_BT, documents_BT = torch.arange(70).repeat(2, 1), None
            if step > 3:
                documents_BT = torch.tensor([[0] * 30 + [1] * 40, [0] * 66 + [1] * 4])
                positions_BT = torch.cat([torch.arange(n) for n in (30, 40, 66, 4)]).view(2, 70)
            microbatch = Microbatch(
                tokens_BT, labels_BT, positions_BT, documents_BT=documents_BT, num_tokens=tokens_BT.numel()
            )
            whole = off in ("fused loss", "all")
            result = train.train_step(
                model, plain_loss if whole else loss.next_token_loss, stepper, [microbatch], seed=0, step=step
            )
            losses.append(result.loss)
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paths") / "model"
    fixtures.write_model(path, head_dim=16)  # which attention has kernels for
    return path


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def expected(request: pytest.FixtureRequest, folder: Path) -> tuple[torch.dtype, list[float]]:
    return request.param, run(folder, request.param)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_off_changes_no_loss(path, folder, expected):
    dtype, losses = expected
    assert losses[0] != losses[-1]
    assert run(folder, dtype, off=path) == pytest.approx(losses, rel=1e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("setting", ["selective", "block"])
def test_checkpointing_changes_no_bit_of_a_loss(setting, folder, expected):
    dtype, losses = expected
    assert run(folder, dtype, setting=setting) == losses


@pytest.mark.slow
def test_compiled_blocks_change_no_loss(folder):
    assert run(folder, torch.float32, setting="compile") == pytest.approx(run(folder, torch.float32), rel=1e-6)

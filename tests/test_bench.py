"""The benchmarks: who runs when, what is read from an unmodified tool, what is counted, and the page that shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optune.config import load
from scripts.bench import contestants, flops, goals, report, roofline, scaling, tables, tool_run
from scripts.bench.peers import take_turns
from tune_cli.recipes import load_recipe

# Other tests of the same process may have loaded JAX, which warns of every fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


# --- Turns ------------------------------------------------------------------------------------------------------------


def test_everybody_has_a_turn_before_anybody_has_a_second_one() -> None:
    everyone = contestants.everyone()
    order = [one.name for _, one in take_turns(everyone, 3, Counter())]
    for turn in range(3):
        assert sorted(order[turn * len(everyone) : (turn + 1) * len(everyone)]) == sorted(one.name for one in everyone)
    assert len({order[0], order[len(everyone)], order[2 * len(everyone)]}) == 3


def test_a_run_that_was_stopped_goes_on_where_it_was() -> None:
    everyone = contestants.quick()
    whole = [one.name for _, one in take_turns(everyone, 2, Counter())]
    for done in range(len(whole) + 1):
        assert [one.name for _, one in take_turns(everyone, 2, Counter(whole[:done]))] == whole[done:]


def test_names_of_contestants_are_theirs_alone() -> None:
    names = Counter(one.name for one in contestants.everyone())
    assert set(names.values()) == {1}
    assert {one.name for one in contestants.quick()} <= set(names)


# --- The tools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one", [one for one in contestants.everyone() if one.tool == "optune"], ids=lambda one: one.cell
)
def test_configs_for_optune_are_ones_that_it_takes(one: contestants.Contestant, tmp_path: Path) -> None:
    *_, recipe, _, config = contestants.optune_command(one, contestants.Places(tmp_path, tmp_path), 9)
    cfg: Any = load(load_recipe(recipe).schema, config)
    assert (cfg.compile, cfg.batch_size, cfg.model.dtype) == (one.compiled, one.rows, one.dtype)
    assert (cfg.optimizer_step == "in_backward") == one.in_backward
    wanted = "block" if one.checkpointed else "selective" if one.selective else "none"
    assert cfg.activation_checkpointing == wanted


TOOL = """
import os, sys
if "again" not in sys.argv:  # a tool may set the stage and start itself anew
    os.execv(sys.executable, [sys.executable, __file__, "again"])
import torch
tried = torch.nn.Parameter(torch.zeros(128, 128)); tried.grad = torch.ones(128, 128)
for _ in range(3):
    torch.optim.SGD([tried], lr=1.0).step()
held = torch.ones(64 * 2**18)  # 64 MiB
own = [[torch.nn.Parameter(torch.zeros(size))] for size in (90000, 500, 80000)]  # as torchtune steps in backward
adapters = [[torch.nn.Parameter(torch.zeros(8, 576)) for _ in range(20)]]
parameters = own if OWN else adapters
optimizers = [torch.optim.AdamW(group, fused=True) for group in parameters]
for step in range(9):
    for group, optimizer in zip(parameters, optimizers):
        for each in group:
            each.grad = torch.ones_like(each)
        optimizer.step()
    print("step", step, flush=True)
raise SystemExit("not reached")
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["an optimizer a parameter", "adapters"])
def test_steps_of_an_unmodified_tool_are_timed_from_its_start_and_it_ends_after_the_last_one(
    own: bool, tmp_path: Path
) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text(TOOL.replace("OWN", str(own)))
    cores = sorted(os.sched_getaffinity(0))[:1]
    found = tool_run.run_tool([sys.executable, str(tool)], tmp_path, tmp_path / "caches", 4, cores=cores, timeout_s=300)
    assert len(found["steps_s"]) == 3
    assert found["first_step_s"] > max(found["steps_s"])  # importing torch comes before the first one
    assert found["first_step_processor_s"] > 0.3
    assert found["peak_mib"] > 64
    assert (found["threads"], found["optimizer"], found["fused"]) == (1, "AdamW", True)
    assert (tmp_path / "output.txt").read_text().count("step") == 3  # the fourth ended it before it could say so


def test_a_tool_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "raise SystemExit('no such model')"]
    with pytest.raises(tool_run.ToolFailedError, match=r"0 of 4 steps(.|\n)*no such model"):
        tool_run.run_tool(command, tmp_path, tmp_path / "caches", 4, cores=[0], timeout_s=60)


# --- What is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
def test_operations_of_a_step_are_those_that_torch_counts_in_transformers(checkpointed: bool) -> None:
    """torch's counter sees whole rows (no causal half), and what a checkpointed block computes again."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager", tie_word_embeddings=True))
    for layer in model.model.layers if checkpointed else []:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    tokens_BT = torch.arange(2 * 24).view(2, 24)
    with FlopCounterMode(display=False) as counter:
        model(tokens_BT, labels=tokens_BT, use_cache=False).loss.backward()
    counted = flops.count_step(CONFIG, 2, 24, checkpointed=checkpointed, causal=False)
    # transformers' rotary table is a matrix product too: positions by frequencies.
    rotary = 2 * 24 * CONFIG["head_dim"] // 2
    assert 0 <= counter.get_total_flops() - counted.done <= 2 * rotary


def test_live_bytes_are_those_that_torchs_allocator_gave_out_and_no_weight_is_among_them() -> None:
    """A weight is first seen as what a linear layer makes of it, its transpose."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from scripts.bench.live_bytes import LiveBytes

    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    rows_ND = torch.randn(32, 64)
    with LiveBytes() as live:
        layers(rows_ND).sum().backward()
    held = live.live
    layers.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        layers(rows_ND).sum().backward()
    given_out = most = 0
    for event in watched.profiler.kineto_results.events():  # pyright: ignore
        given_out += event.nbytes() if event.name() == "[memory]" else 0  # pyright: ignore
        most = max(most, given_out)
    gradients = sum(weight.nbytes for weight in layers.parameters())
    assert gradients < most < 2 * gradients  # with the weights it would be more
    assert live.peak == pytest.approx(most, rel=0.01)
    assert (held, live.live) == (gradients, 0)


def test_a_causal_row_has_the_pairs_that_see_each_other() -> None:
    pairs = sum(query + 1 for query in range(7))
    whole, causal = (flops.attention_forward(CONFIG, 1, 7, causal=causal) for causal in (False, True))
    assert causal * 49 == whole * pairs


def test_times_on_a_line_are_on_it_and_others_are_told_apart() -> None:
    start, slope, off = scaling.line_through({tokens: 0.2 + 0.001 * tokens for tokens in (512, 1024, 4096, 8192)})
    assert (start, slope) == pytest.approx((0.2, 0.001))
    assert max(map(abs, off.values())) < 1e-9
    bent = scaling.line_through({tokens: 0.001 * tokens + 1e-7 * tokens**2 for tokens in (512, 1024, 4096, 8192)})[2]
    assert max(map(abs, bent.values())) > 0.05


def test_rate_of_a_step_is_its_work_over_the_time_of_all_its_products() -> None:
    """Three seconds of work at 1 GFLOP/s and three at 2 are nine in six, whatever the mean of the rates is."""
    layer = {"dtype": "bfloat16", "k": 100, "n": 1000, "times": 1}  # 1 GFLOP each of its products with 5,000 tokens
    result = {
        "rows": 5, "length": 1000,
        "products": [
            layer | {"gflops_per_s": {"forward": 1.0, "dX": 1.0, "dW": 1.0}},
            layer | {"times": 2, "gflops_per_s": {"forward": 2.0, "dX": 2.0, "dW": 2.0}},
        ],
        "steps": [
            {"mode": "compiled", "dtype": "bf16", "seconds": [9.0, 6.0, 5.0],
             "flops": {"linear": 4e9, "attention": 5e8, "recomputed": 9e8}},
        ],
    }  # fmt: skip
    assert roofline.machine_rate(result, "bfloat16") == pytest.approx(1.5)
    (share,) = roofline.step_shares(result)
    assert (share["needed"], share["needed_share"]) == pytest.approx((0.75, 0.5))
    assert (share["done"], share["done_share"]) == pytest.approx((0.9, 0.6))


# --- The page ---------------------------------------------------------------------------------------------------------


def run_of(tool: str, steps_s: list[float], peak_mib: float, **changed: Any) -> dict[str, Any]:
    one = contestants.Contestant(tool)
    return {
        "name": one.name, "tool": tool, "tokens_per_step": 2048, "turn": 0, "installed_mib": 1000, "steps_s": steps_s,
        "peak_mib": peak_mib, "first_step_s": 9.0,
    } | changed  # fmt: skip


def test_table_of_the_peers_has_medians_ratios_and_failures() -> None:
    runs = [
        run_of("torchtune", [9.0, 8.0, 8.0, 8.0], 4000.0),
        run_of("trl", [9.0, 10.0, 10.0, 10.0], 5000.0),
        run_of("optune", [9.0, 4.0, 4.0, 4.0], 2000.0),
        run_of("optune", [9.0, 5.0, 5.0, 5.0], 2200.0),
        run_of("litgpt", [], 0.0, failed="out of memory"),
    ]
    table = tables.peers_table(runs)
    (row,) = [line for line in table.splitlines() if "optune" in line and line.startswith("|")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    # Medians of 512 and 409.6 tokens/s; 460.8 / 256 and 2,100 / 4,000 beside the better of the others.
    assert cells[2:] == ["461", "410–512", "1.80 ×", "2,100", "0.53 ×", "9.0"]
    assert "Failed: litgpt: full bf16 4 x 512, eager." in table


def test_goals_are_met_missed_or_not_measured() -> None:
    runs = [run_of("torchtune", [8.0] * 4, 4000.0), run_of("optune", [5.0] * 4, 3000.0)]
    lines = [goal.line for goal in goals.peer_goals(runs)]
    assert "met    full bf16 4 x 512, eager: × torchtune's tokens/s: ≥ 1.4, found 1.6" in lines
    assert "MISSED full bf16 4 x 512, eager: × torchtune's memory: ≤ 0.6, found 0.75" in lines
    assert "?      full bf16 4 x 512, compiled: × torchtune's tokens/s: ≥ 1.3, not measured" in lines


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    page = "a\n<!-- bench: peers -->\nold\n<!-- end -->\nb\n<!-- bench: sizes -->\nkept\n<!-- end -->\n"
    once = report.fill(page, {"peers": "| new \\1 |"})
    assert once == page.replace("old\n", "\n| new \\1 |\n\n")
    assert report.fill(once, {"peers": "| new \\1 |"}) == once
    with pytest.raises(SystemExit, match="bench: other"):
        report.fill(page, {"other": ""})


def test_tables_of_the_page_are_those_of_the_results_beside_its_plots() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for name, result in report.read_results(ROOT / "docs/images").items():
        assert report.fill(page, report.PARTS[name](result)) == page, f"python -m scripts.bench report ({name})"
        assert (ROOT / f"docs/images/bench_{name}.png").exists()


def test_results_of_two_machines_are_not_mixed(tmp_path: Path) -> None:
    lines = [run_of("trl", [1.0] * 4, 1.0) | {"machine": {"cores": cores}} for cores in (2, 4)]
    (tmp_path / "peers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit, match="2 machines"):
        report.take_results(tmp_path, tmp_path)


@pytest.mark.slow
def test_every_benchmark_answers_help() -> None:
    program = textwrap.dedent("""
        import contextlib, io, sys
        from scripts.bench import __main__ as bench
        for name in bench.COMMANDS:
            sys.argv = ["bench", name, "--help"]
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
                bench.main()
            assert f"scripts.bench {name}" in said.getvalue(), name
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

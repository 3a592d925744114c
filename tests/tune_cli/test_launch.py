"""Several processes: torchrun's options are passed on, and what a user sees at the end is the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tune_cli.conftest import Optune, Result
from tune_cli.launch import Failure, _guess_cause, split_launch_options
from tune_cli.run import make_parser

RUN = "optune run --nproc-per-node 2 fake.py --config c.yaml"


@pytest.mark.parametrize(
    ("words", "launch_words", "rest"),
    [
        (["fake.py", "--config", "c"], [], ["fake.py", "--config", "c"]),
        (["--nproc-per-node", "2", "fake.py", "a=1"], ["--nproc-per-node", "2"], ["fake.py", "a=1"]),
        (["--nproc_per_node=2", "--standalone", "f"], ["--nproc_per_node=2", "--standalone"], ["f"]),
        (["--config", "c", "--nnodes", "1:2", "f"], ["--nnodes", "1:2"], ["--config", "c", "f"]),
        (["--rdzv-endpoint", "h:1", "-t", "3", "f", "x"], ["--rdzv-endpoint", "h:1", "-t", "3"], ["f", "x"]),
        (["--max-restarts=3", "--config=c", "f"], ["--max-restarts=3"], ["--config=c", "f"]),
    ],
)
def test_options_before_the_recipe_go_to_torchrun(words: list[str], launch_words: list[str], rest: list[str]) -> None:
    assert split_launch_options(words, make_parser("run", "", "")) == (launch_words, rest)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nproc-per-nod 2 fake.py --config c.yaml", "did you mean '--nproc-per-node'?"),
        ("--cofnig c.yaml fake.py", "did you mean '--config'?"),
        ("--module fake.py --config c.yaml", "optune says what the workers run"),
        ("--nproc-per-node two fake.py --config c.yaml", "must be a number, cpu, gpu or auto, not 'two'"),
        ("--nnodes x fake.py --config c.yaml", "--nnodes"),
        ("--nproc-per-node 2 fake.py --config c.yaml epochs=x", "epochs must be a whole number"),
        ("--nproc-per-node 2 faek.py --config c.yaml", "there is no such recipe file"),
    ],
)
def test_wrong_command_or_config_starts_no_worker(
    optune: Optune, folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    def start(options: object) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr("torch.distributed.run.elastic_launch", start)
    result = optune("run", *words.split())
    assert result.code == 2, result.err
    assert message in result.err


def test_worker_that_died_without_a_word_is_explained() -> None:
    assert _guess_cause(Failure(1, 137, 0.0)) == (
        "the worker was killed by SIGKILL",
        "the system kills a process that asks for more memory than there is",
    )
    assert _guess_cause(Failure(1, 3, 0.0))[0] == "the worker ended with exit code 3 and said no more"


@pytest.mark.slow
def test_two_workers_that_end_well_are_a_success(shell: Callable[[str], Result], folder: Path) -> None:
    result = shell(RUN)
    assert result.code == 0, result.err
    assert {path.name for path in (folder / "runs/x").glob("ran-*")} == {"ran-0", "ran-1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "code", "last"),
    [
        ("fail-1", 1, "error: rank 1: rows.jsonl:1: it broke\nhint: mend it\n"),
        ("model", 2, "error: rank 0: /m0: no weights\n"),
        ("kill-1", 137, "hint: the system kills a process that asks for more memory than there is\n"),
    ],
)
def test_first_failing_ranks_cause_comes_last_and_its_code_through_a_pipe(
    shell: Callable[[str], Result], behaviour: str, code: int, last: str
) -> None:
    result = shell(f"{RUN} behaviour={behaviour} 2>&1 | tee log.txt && echo BAD")
    assert result.code == code
    assert "BAD" not in result.out
    assert result.out.replace("rank 1: /m0", "rank 0: /m0").endswith(last)
    assert result.out.count("error: ") == 1
    assert "Traceback" not in result.out
    assert "torch" not in result.out


@pytest.mark.parametrize(
    ("override", "code"), [("seed=x", 2), pytest.param("behaviour=fail", 1, marks=pytest.mark.slow)]
)
def test_one_process_that_fails_never_counts_as_success(
    shell: Callable[[str], Result], override: str, code: int
) -> None:
    result = shell(f"optune run fake.py --config c.yaml {override} 2>&1 | tee log.txt && echo BAD")
    assert result.code == code
    assert "BAD" not in result.out

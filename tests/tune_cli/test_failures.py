"""Of what several ranks leave behind, the cause is found, named after its rank, and decides the exit code."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from optune.errors import ConfigError, TrainingError
from tune_cli import messages, worker
from tune_cli.failures import Conclusion, End, conclude, pack, read_ends, unpack
from tune_cli.stopping import HungUp, Terminated

GLOO_CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:26304: Connection reset by peer."
    " This is typically caused by a remote worker hanging or bugs in the application."
)
GLOO_SLOW = "[/pytorch/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"
NO_ANSWER = "another process of this run does not answer"


def failed(rank: int, when: float, message: str = "it broke", **values: Any) -> End:
    return End(rank, **{"kind": "failed", "exit_code": 1, "time": when, "causes": [(message, None)]} | values)


def test_the_rank_that_failed_first_is_named() -> None:
    found = conclude([failed(0, 5.0, "late"), failed(1, 4.0, "early"), End(2, "dropped", 1, 0.0)])
    assert (found.causes, found.exit_code) == ([("rank 1: early", None)], 1)


def test_what_all_ranks_say_is_everybodys() -> None:
    found = conclude([failed(0, 5.0, exit_code=2), failed(1, 4.0, exit_code=2)])
    assert found.causes == [("it broke", None)]
    assert (found.exit_code, found.may_restart) == (2, False)
    assert conclude([failed(0, 1.0)]).causes == [("it broke", None)]


def test_ranks_that_lost_the_others_are_not_the_cause() -> None:
    lost = failed(0, 1.0, NO_ANSWER, kind="lost")
    found = conclude([lost, End(1, "died", 1, 2.0, [("killed", "hint")])])
    assert (found.causes, found.is_lost) == ([("rank 1: killed", "hint")], False)
    alone = conclude([lost, End(1, "dropped", 1, 0.0)])
    assert (alone.causes[0][0], alone.is_lost) == (f"rank 0: {NO_ANSWER}", True)
    assert "rank 1 was still running" in str(alone.causes[0][1])


@pytest.mark.parametrize(
    ("codes", "worst"), [((0, 2), 2), ((2, 1), 1), ((143, 0), 143), ((143, 1), 1), ((7, 2), 7), ((0, 0), 0)]
)
def test_the_exit_code_is_the_worst(codes: tuple[int, int], worst: int) -> None:
    kinds = {0: "done", 143: "stopped"}
    ends = [End(rank, kinds.get(code, "failed"), code, 1.0, [("x", None)]) for rank, code in enumerate(codes)]
    assert conclude(ends).exit_code == worst


def test_a_stop_is_no_failure_and_is_not_restarted() -> None:
    found = conclude([End(0, "stopped", 143, 1.0), End(1, "stopped", 143, 1.0)])
    assert found == Conclusion(143)
    assert not found.may_restart


def test_ends_without_a_report_are_read_from_the_process(tmp_path: Path) -> None:
    (tmp_path / "rank-0001.txt").write_text("Fatal Python error: Aborted\n")
    codes = {0: 0, 1: -6, 2: -9, 3: -15, 4: 3, 5: -9}
    ends = read_ends(tmp_path, codes, dict.fromkeys(range(5), 1.0))
    assert [end.kind for end in ends] == ["done", "died", "died", "stopped", "died", "dropped"]
    assert [end.exit_code for end in ends] == [0, 1, 1, 143, 3, 1]
    assert (ends[1].causes[0][0], ends[1].last_words) == (
        "the process was killed by SIGABRT",
        "Fatal Python error: Aborted",
    )
    assert "more memory than there is" in str(ends[2].causes[0][1])
    assert ends[4].causes[0][0] == "the process ended with exit code 3 and said no more"


def leave(monkeypatch: pytest.MonkeyPatch, folder: Path, error: BaseException, rank: int = 0) -> End:
    """What the launcher reads of a rank that ended with `error`."""
    monkeypatch.setenv(worker.FOLDER, str(folder))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(worker, "_OTHERS_S", 0.0)
    messages.report(error, exit_code=1)
    return read_ends(folder, {rank: 1}, {rank: 1.0})[0]


def chain(*errors: BaseException) -> BaseException:
    """The last of `errors`, each raised while the one before was handled."""
    for before, after in itertools.pairwise(errors):
        after.__context__ = before
    return errors[-1]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (TrainingError("no"), "failed", "no"),
        (RuntimeError("boom"), "failed", "RuntimeError: boom"),
        (Terminated(), "stopped", "terminated"),
        (HungUp(), "dropped", "interrupted"),
        (RuntimeError(GLOO_CLOSED), "lost", f"{NO_ANSWER}: Read error [127.0.0.1]:26304: Connection reset by peer"),
        (RuntimeError(GLOO_SLOW), "lost", f"{NO_ANSWER}: Timed out waiting 5000ms for recv operation"),
        (chain(RuntimeError(GLOO_CLOSED), TrainingError("the save failed")), "lost", NO_ANSWER),
        (chain(TrainingError("no room"), RuntimeError(GLOO_CLOSED)), "failed", "no room"),
    ],
)  # fmt: skip
def test_a_worker_tells_what_it_did_from_what_was_done_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    error: BaseException, kind: str, message: str,
) -> None:  # fmt: skip
    end = leave(monkeypatch, tmp_path, error)
    assert (end.kind, end.causes[0][0][: len(message)]) == (kind, message)
    assert type(error).__name__ in end.traceback
    assert capfd.readouterr() == ("", "")


def test_several_causes_and_hints_reach_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    end = leave(monkeypatch, tmp_path, ConfigError("bad", where="a.yaml:3", hint="say b"), rank=3)
    assert (end.rank, end.causes) == (3, [("a.yaml:3: bad", "say b")])
    assert unpack(pack(conclude([end]))) == conclude([end])
    assert json.loads((tmp_path / "rank-0003.json").read_text())["host"]

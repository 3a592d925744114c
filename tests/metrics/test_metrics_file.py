"""metrics.jsonl holds whole lines, each step once, whatever happened before."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optune.errors import OptuneError
from optune.metrics import read_metrics
from optune.metrics.metrics_file import MetricsFile


def fill(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def test_lines_are_json_in_the_order_given(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.append({"step": 1, "loss": 0.1 + 0.2})
    file.append({"step": 2, "loss": 1e-9, "grad_norm": None})
    file.close()
    assert (
        path.read_text() == '{"step": 1, "loss": 0.30000000000000004}\n{"step": 2, "loss": 1e-09, "grad_norm": null}\n'
    )
    assert read_metrics(path)[0]["loss"] == 0.1 + 0.2


def test_a_validation_that_is_owed_is_not_there_twice(tmp_path: Path) -> None:
    """A run that was killed between logging it and saving."""
    lines = ['{"step": 3, "loss": 1.0}\n', '{"step": 4, "loss": 1.0}\n', '{"step": 4, "validation_loss": 2.0}\n']
    path = fill(tmp_path / "metrics.jsonl", *lines)
    MetricsFile(path, last_step=4).close()
    assert path.read_text() == "".join(lines)
    file = MetricsFile(path, last_step=4, owes_validation=True)
    file.close()
    assert (path.read_text(), file.dropped) == ("".join(lines[:2]), 1)


def test_values_that_json_does_not_have_are_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1})
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1, "non_finite": ["loss", "grad_norm"]}


def test_a_resumed_run_drops_later_lines_and_keeps_the_old_ones_byte_for_byte(tmp_path: Path) -> None:
    kept = ['{"step": 1,  "loss": 3.0}\n', '{"step": 2, "loss": 2.0}\n', '{"step": 2, "validation_loss": 2.5}\n']
    lost = ['{"step": 3, "loss": 1.0}\n', '{"step": 3, "validation_loss": 1.5}\n']
    path = fill(tmp_path / "metrics.jsonl", *kept, *lost)
    file = MetricsFile(path, last_step=2)
    assert file.dropped == 2
    file.append({"step": 3, "loss": 1.0})
    assert path.read_text() == "".join(kept) + '{"step": 3, "loss": 1.0}\n'


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2}', "\0\0\0", '{"step": 2, "loss": 1.0'])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    path = fill(tmp_path / "metrics.jsonl", '{"step": 1, "loss": 3.0}\n', torn)
    assert [line["step"] for line in read_metrics(path)] == [1]
    MetricsFile(path, last_step=5).append({"step": 6})
    assert [line["step"] for line in read_metrics(path)] == [1, 6]
    assert path.read_text().count("\n") == 2


def test_a_fresh_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    path = fill(tmp_path / "metrics.jsonl", '{"step": 1, "loss": 3.0}\n')
    MetricsFile(path).close()
    assert path.read_text() == ""
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.append({"step": 1, "loss": 1.0})
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(OptuneError, match=r"metrics\.jsonl: it cannot be written"):
            file.append({"step": 2, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n'


def test_a_file_that_cannot_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OptuneError, match=r"metrics\.jsonl: it cannot be written: No such file or directory"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl")


def test_a_kill_while_logging_costs_at_most_the_unfinished_line(tmp_path: Path) -> None:
    """A SIGKILL may reach the process while the kernel copies a line, between two pages."""
    code = (
        "import sys; from pathlib import Path; from optune.metrics.metrics_file import MetricsFile\n"
        "file = MetricsFile(Path(sys.argv[1]))\n"
        "for step in range(10**9): file.append({'step': step, 'text': 'x' * (step % 3000)})"
    )
    for trial in range(6):
        path = tmp_path / f"{trial}.jsonl"
        process = subprocess.Popen([sys.executable, "-c", code, str(path)])
        while not path.exists() or path.stat().st_size < 100_000 * (trial + 1):
            assert process.poll() is None
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        whole = path.read_bytes().count(b"\n")
        assert [line["step"] for line in read_metrics(path)] == list(range(whole))
        MetricsFile(path, last_step=10**9).close()
        content = path.read_bytes()
        assert content.endswith(b"\n")
        assert [json.loads(line)["step"] for line in content.splitlines()] == list(range(whole))

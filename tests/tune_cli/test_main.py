"""Help, unknown words, and how errors are printed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tune_cli.main
from tests.tune_cli.conftest import Optune, Result
from tune_cli.stopping import Terminated, signals_unwind

RUN = ("run", "fake.py", "--config", "c.yaml")


def test_help_lists_the_commands_that_there_are_and_no_others(optune: Optune) -> None:
    result = optune("--help")
    assert result.code == 0
    listed = [line.split()[0] for line in result.out.splitlines() if line.startswith("  ")]
    files = Path(tune_cli.main.__file__).parent.glob("*.py")
    there = [
        path.stem.replace("_", "-")
        for path in files
        if "\ndef run(words: list[str]) -> int:" in path.read_text(encoding="utf-8")
    ]
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("command", tune_cli.main.COMMANDS)
def test_every_command_has_help_that_names_it(optune: Optune, command: str) -> None:
    for flag in ("--help", "-h"):
        result = optune(command, flag)
        assert result.code == 0
        assert result.out.startswith(f"usage: optune {command}")


def test_help_ls_cat_and_cp_import_neither_torch_nor_hydra_nor_a_yaml_reader(folder: Path) -> None:
    program = (
        "import sys\nfrom tune_cli.main import main\n"
        "for words in (['--help'], ['ls'], ['cat', 'tiny/full'], ['cp', 'tiny/full', 'mine.yaml']):\n"
        "    assert main(words) == 0\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'yaml', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["ls"], ["cat", "full_finetune"]])
def test_help_ls_and_cat_answer_in_a_fifth_of_a_second(folder: Path, words: list[str]) -> None:
    """In time of the processor, so that a busy machine makes no difference."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(3):
        before = used()
        subprocess.run([sys.executable, "-m", "tune_cli.main", *words], check=True, capture_output=True)
        seconds.append(used() - before)
    assert min(seconds) < 0.2, seconds


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["rnu"], "unknown command 'rnu'", "did you mean 'run'?"),
        (["zzz"], "unknown command 'zzz'", "`optune --help` lists the commands"),
        (["chat", "m0"], "unknown command 'chat'", "did you mean 'cat'?"),
        (["run", "fake.py", "--confg", "c.yaml"], "optune run has no option '--confg'", "did you mean '--config'?"),
        (["cp", "a", "b", "--forec"], "optune cp has no option '--forec'", "did you mean '--force'?"),
        (["cat"], "optune cat: NAME is missing", "usage: optune cat NAME"),
        (["cat", "a", "b"], "optune cat: 'b' is one word too many", "usage: optune cat NAME"),
        (["run", "fake.py", "--config"], "--config: a value is missing", "--config CONFIG: a shipped name"),
        (["run", "--config", "c.yaml", "seed=1"], "optune run: RECIPE is missing", "usage:"),
        (["run", "fake.py"], "optune run: --config is missing", "usage:"),
        (["run", "fake"], "optune run: --config is missing", "usage:"),
        (["resume"], "optune resume: RUN_DIR is missing", "usage:"),
    ],
)
def test_wrong_words_are_answered_with_one_cause_and_a_way_out(
    optune: Optune, words: list[str], error: str, hint: str
) -> None:
    result = optune(*words)
    assert result.code == 2
    first, second = result.err.splitlines()
    assert first == f"error: {error}"
    assert second.startswith(f"hint: {hint}")
    assert result.out == ""


def test_no_words_at_all_print_the_help_as_an_error(optune: Optune) -> None:
    result = optune()
    assert result.code == 2
    assert "usage: optune COMMAND" in result.err


def test_version(optune: Optune) -> None:
    import optune as package

    assert optune("--version").out == f"optune {package.__version__}\n"


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [("fail", 1), ("model", 2), ("crash", 1), ("interrupt", 130), ("exit", 7), ("stopped", 143), ("fine", 0)],
)
def test_exit_code_says_how_it_ended(optune: Optune, behaviour: str, code: int) -> None:
    assert optune(*RUN, f"behaviour={behaviour}").code == code


def test_known_failure_is_one_cause_without_a_traceback(optune: Optune) -> None:
    assert optune(*RUN, "behaviour=fail").err == "error: rows.jsonl:0: it broke\nhint: mend it\n"


def test_unforeseen_failure_names_its_type_and_how_to_see_more(optune: Optune) -> None:
    result = optune(*RUN, "behaviour=crash")
    assert result.err == "error: RuntimeError: boom\nhint: this was not foreseen; --debug shows where it happened\n"


@pytest.mark.parametrize("words", [("--debug", *RUN), (*RUN, "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(optune: Optune, words: tuple[str, ...]) -> None:
    result = optune(*words, "behaviour=crash")
    assert "Traceback" in result.err
    assert "fake.py" in result.err
    assert "error: RuntimeError: boom" in result.err


def test_terminal_that_is_not_utf8_gets_escapes(fresh_shell: Callable[[str], Result]) -> None:
    result = fresh_shell("PYTHONIOENCODING=ascii optune --help")
    assert (result.code, result.err) == (0, "")
    assert "[key=value \\u2026]" in result.out


def test_closed_stdout_is_no_error(fresh_shell: Callable[[str], Result]) -> None:
    assert fresh_shell("optune ls >&-") == Result(0, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("unbuffered", "words"), [("", "standard output: cannot be written: "), ("1", "found no room: ")]
)
def test_a_full_disk_behind_stdout_is_one_clear_error(fresh_shell, unbuffered: str, words: str) -> None:
    result = fresh_shell(f"PYTHONUNBUFFERED={unbuffered} optune ls > /dev/full")
    assert result.code == 1
    assert result.err.count("error:") == 1
    assert words in result.err
    assert "not foreseen" not in result.err
    assert "Exception ignored" not in result.err


def test_closed_pipe_is_quiet(fresh_shell: Callable[[str], Result]) -> None:
    result = fresh_shell("for i in 1 2 3; do optune cat full_finetune; done | true")
    assert result.err == ""
    assert result.code in (0, tune_cli.main.PIPE_CLOSED)


def test_a_signal_that_code_in_c_makes_another_error_of_is_still_the_signal() -> None:
    def load() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    with pytest.raises(Terminated), signals_unwind():
        load()
    with pytest.raises(ValueError, match="of its own"), signals_unwind():
        raise ValueError("an error of its own")


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_worker_that_is_asked_to_stop_is_let_finish() -> None:
    steps: list[str] = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("unwound")

    with pytest.raises(Terminated), signals_unwind(is_worker=True):
        work()
    os.kill(os.getpid(), signal.SIGTERM)
    assert steps == ["unwound"]

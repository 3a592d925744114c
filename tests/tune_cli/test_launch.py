"""Several processes: torchrun's options are passed on, and what a user sees at the end is the cause."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optune.errors import ConfigError, TrainingError
from tests.tune_cli.conftest import Optune, Result
from tune_cli import launch, machines
from tune_cli.launch import OURS, split_launch_options
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
        (["--nproc", "gpu", "--stand", "-r3", "f"], ["--nproc", "gpu", "--stand", "-r3"], ["f"]),
        (["--nproc_per=2", "--rdzv-conf", "a=1,b=2", "f"], ["--nproc_per=2", "--rdzv-conf", "a=1,b=2"], ["f"]),
    ],
)
def test_options_before_the_recipe_go_to_torchrun(words: list[str], launch_words: list[str], rest: list[str]) -> None:
    assert split_launch_options(words, make_parser("run", "", "")) == (launch_words, rest)


def test_every_option_of_torchrun_is_passed_on_as_torchrun_reads_it() -> None:
    """The judge is torch's own parser: it reads what was split off as it reads the whole line."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    assert len(options) > 25
    for action in options:
        for name in action.option_strings:
            if name in OURS:
                continue
            value = (action.choices or {int: ["7"], float: ["0.5"]}.get(action.type, ["1:3"]))[0]  # type: ignore[index]
            words = [name] if action.nargs == 0 else [name, str(value)]
            launch_words, rest = split_launch_options([*words, "--config", "c", "fake.py"], make_parser("run", "", ""))
            assert rest == ["--config", "c", "fake.py"]
            assert vars(parser.parse_args([*launch_words, "x"])) == vars(parser.parse_args([*words, "x"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nproc-pre-node 2 fake.py --config c.yaml", "did you mean '--nproc-per-node'?"),
        ("--cofnig c.yaml fake.py", "did you mean '--config'?"),
        ("--module fake.py --config c.yaml", "optune says what the workers run"),
        ("--no-pyth fake.py --config c.yaml", "optune says what the workers run"),
        ("--n 2 fake.py --config c.yaml", "may be --nnodes or"),
        ("--nproc-per-node two fake.py --config c.yaml", "must be a number, cpu, gpu or auto, not 'two'"),
        ("--nproc-per-node 0 fake.py --config c.yaml", "--nproc-per-node must be 1 or more, not 0"),
        ("--nnodes 1:2 fake.py --config c.yaml", "a run keeps its number of machines"),
        (
            "--nproc-per-node 3 fake.py --config c.yaml parallel.replicate=2",
            "does not divide the number of processes, 3",
        ),
        ("--nproc-per-node 2 fake.py --config c.yaml device=cuda:0", "is one device, and 2 processes"),
        ("--nproc-per-node 2 fake.py --config c.yaml max_steps=4 schedule.warmup_steps=5", "would never be reached"),
        ("--nnodes x fake.py --config c.yaml", "--nnodes"),
        ("--nnodes 2:1 fake.py --config c.yaml", "--nnodes"),
        ("--max-restarts -1 fake.py --config c.yaml", "--max-restarts must be 0 or more"),
        ("--signals-to-handle SIGFOO fake.py --config c.yaml", "'SIGFOO', which is no signal"),
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
    assert "Traceback" not in result.err


def test_a_launcher_inside_a_launcher_is_refused(optune: Optune, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    result = optune("run", "--nproc-per-node", "2", "fake.py", "--config", "c.yaml")
    assert (result.code, "a launcher already" in result.err) == (2, True)


def read_options(*words: str) -> argparse.Namespace:
    return launch._torchrun_parser().parse_args([*words, "x"])


@pytest.fixture
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machines.GLOO_INTERFACE, "x")
    monkeypatch.delenv(machines.GLOO_INTERFACE)


def test_processes_of_one_machine_meet_on_loopback(no_interface: None) -> None:
    options = read_options("--nproc-per-node", "2")
    machines.set_addresses(options, 1)
    assert options.local_addr == "127.0.0.1"
    assert os.environ[machines.GLOO_INTERFACE].startswith("lo")


def test_what_a_user_says_of_addresses_stays(no_interface: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machines.GLOO_INTERFACE, "eth7")
    options = read_options(
        "--local-addr", "10.1.2.3", "--rdzv-backend", "c10d", "--rdzv-conf", "read_timeout=7,is_host=0"
    )
    options.rdzv_endpoint = "127.0.0.1:29511"
    machines.set_addresses(options, 2)
    assert (options.local_addr, options.rdzv_conf) == ("10.1.2.3", "read_timeout=7,is_host=0")
    assert os.environ[machines.GLOO_INTERFACE] == "eth7"


OUTWARD = "10.1.2.3"


def play_network(monkeypatch: pytest.MonkeyPatch, ways: dict[str, tuple[str, str] | None], silent: int = 0) -> None:
    """A machine with the interfaces lo and eth0, whose way to each host leads from an address to one; None is no way.
    At first there is none for so many questions."""
    asked = 0

    def find(host: str, port: int) -> tuple[machines.Address, machines.Address]:
        nonlocal asked
        asked += 1
        way = ways.get(host) if asked > silent else None
        if way is None:
            raise OSError(101, "Network is unreachable")
        return machines._parse(way[0]), machines._parse(way[1])

    interfaces = {"127.0.0.1": "lo", OUTWARD: "eth0"}
    monkeypatch.setattr(machines, "_find_own_address", find)
    monkeypatch.setattr(machines, "_find_interface", lambda own: interfaces.get(str(own)))
    monkeypatch.setattr("psutil.net_if_stats", dict)
    monkeypatch.setattr(machines, "LOOK_S", 0.001)
    monkeypatch.setattr(machines, "NETWORK_S", 0.1)


NODE_A = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a:29511")
OWN_NAME = {"node-a": ("127.0.1.1", "127.0.1.1")}
"""As in an /etc/hosts that maps the machine's own name to 127.0.1.1."""
DEFAULT_ROUTE = {machines.ELSEWHERE[0]: (OUTWARD, machines.ELSEWHERE[0])}


def test_a_machine_whose_name_means_loopback_tells_the_others_the_address_of_its_default_route(
    no_interface: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_network(monkeypatch, OWN_NAME | DEFAULT_ROUTE)
    options = read_options(*NODE_A)
    machines.set_addresses(options, 2)
    assert (options.local_addr, os.environ[machines.GLOO_INTERFACE]) == (OUTWARD, "eth0")
    assert "is_host=true" in options.rdzv_conf


@pytest.mark.parametrize(("address", "is_host"), [(OUTWARD, "true"), ("10.1.2.4", "false")])
def test_a_machine_that_cannot_resolve_its_own_name_knows_by_its_address_whether_it_holds_the_rendezvous(
    no_interface: None, monkeypatch: pytest.MonkeyPatch, address: str, is_host: str
) -> None:
    def resolve(host: str) -> bool:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    play_network(monkeypatch, {"node-a": (OUTWARD, address)})
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.utils._matches_machine_hostname", resolve)
    options = read_options(*NODE_A)
    machines.set_addresses(options, 2)
    assert f"is_host={is_host}" in options.rdzv_conf


def test_an_address_that_a_user_gives_decides_the_interface(
    no_interface: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_network(monkeypatch, OWN_NAME | {OUTWARD: (OUTWARD, OUTWARD)})
    options = read_options("--local-addr", OUTWARD, *NODE_A)
    machines.set_addresses(options, 2)
    assert (options.local_addr, os.environ[machines.GLOO_INTERFACE]) == (OUTWARD, "eth0")


def test_a_network_that_comes_late_is_waited_for(no_interface: None, monkeypatch: pytest.MonkeyPatch) -> None:
    play_network(monkeypatch, {"node-a": (OUTWARD, "10.1.2.4")}, silent=4)
    options = read_options(*NODE_A)
    machines.set_addresses(options, 2)
    assert (options.local_addr, os.environ[machines.GLOO_INTERFACE]) == (OUTWARD, "eth0")
    assert "is_host" not in options.rdzv_conf


@pytest.mark.parametrize(("ways", "why"), [({}, "Network is unreachable"), (OWN_NAME, "node-a is 127.0.1.1 here")])
def test_without_an_address_that_others_reach_the_launch_fails_after_a_bounded_time(
    no_interface: None, monkeypatch: pytest.MonkeyPatch, ways: dict[str, tuple[str, str]], why: str
) -> None:
    play_network(monkeypatch, ways)
    with pytest.raises(TrainingError, match=rf"^rendezvous node-a:29511: .* no address of its own .*{why}") as failure:
        machines.set_addresses(read_options(*NODE_A), 2)
    assert "--local-addr" in (failure.value.hint or "")
    assert machines.GLOO_INTERFACE not in os.environ


def test_an_interface_that_no_other_machine_reaches_is_refused(
    no_interface: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_network(monkeypatch, {"node-a": (OUTWARD, "10.1.2.4"), "127.0.0.1": ("127.0.0.1", "127.0.0.1")})
    monkeypatch.setenv(machines.GLOO_INTERFACE, "lo")
    with pytest.raises(ConfigError, match=r"^GLOO_SOCKET_IFNAME=lo: no other machine reaches"):
        machines.set_addresses(read_options(*NODE_A), 2)
    here = read_options("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29511")
    machines.set_addresses(here, 2)
    assert here.local_addr == "127.0.0.1"


def test_a_launch_leaves_the_environment_as_it_was(
    optune: Optune, monkeypatch: pytest.MonkeyPatch, no_interface: None
) -> None:
    """What is filled in for one machine must not keep the next launch, of several, to loopback."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    seen: dict[str, str] = {}

    def start(options: object) -> None:
        seen.update(os.environ)

    monkeypatch.setattr("torch.distributed.run.run", start)
    optune("run", "--nproc-per-node", "0", "fake.py", "--config", "c.yaml")  # so that what torch itself sets is there
    before = dict(os.environ)
    assert optune("run", "--nproc-per-node", "2", "fake.py", "--config", "c.yaml").code == 0
    assert seen[machines.GLOO_INTERFACE].startswith("lo") and "OMP_NUM_THREADS" in seen
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "code", "traceback", "last"),
    [
        (
            "fail-1 --debug",
            1,
            'raise TrainingError("it broke"',
            "error: rank 1: rows.jsonl:1: it broke\nhint: mend it\n",
        ),
        ("model", 2, "", "error: /m0: no weights\n"),
        ("kill-1", 1, "", "hint: the system kills a process that asks for more memory than there is\n"),
    ],
)
def test_first_failing_ranks_cause_comes_last_and_its_code_through_a_pipe(
    shell: Callable[[str], Result], behaviour: str, code: int, traceback: str, last: str
) -> None:
    """The other rank sleeps for ten minutes in `fail-1` and `kill-1`: nobody waits for it."""
    began = time.monotonic()
    result = shell(f"{RUN} behaviour={behaviour} 2>&1 | tee log.txt && echo BAD")
    assert time.monotonic() - began < 300
    assert result.code == code
    assert "BAD" not in result.out
    assert result.out.endswith(last)
    assert result.out.count("error: ") == 1
    assert result.out.count("Traceback") == bool(traceback)
    assert traceback in result.out
    assert "torch" not in result.out


@pytest.mark.slow
def test_plain_torchrun_starts_the_same_command_and_fails_when_it_does(
    shell: Callable[[str], Result], folder: Path
) -> None:
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    run = f"{torchrun} -m tune_cli.main run fake.py --config c.yaml"
    result = shell(f"{RUN} && {run} behaviour=fail-1 output_dir=runs/y && echo BAD")
    assert result.code == 1
    assert "BAD" not in result.out
    assert {path.name for path in (folder / "runs/x").glob("ran-*")} == {"ran-0", "ran-1"}
    assert "error: rank 1: rows.jsonl:1: it broke\nhint: mend it\n" in result.err


@pytest.mark.parametrize(
    ("override", "code"), [("seed=x", 2), pytest.param("behaviour=fail", 1, marks=pytest.mark.slow)]
)
def test_one_process_that_fails_never_counts_as_success(
    shell: Callable[[str], Result], override: str, code: int
) -> None:
    result = shell(f"optune run fake.py --config c.yaml {override} 2>&1 | tee log.txt && echo BAD")
    assert result.code == code
    assert "BAD" not in result.out

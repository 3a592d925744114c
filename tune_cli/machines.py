"""Several machines: the addresses by which they find each other, and whether the others are still there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from optune.errors import ConfigError, TrainingError

BEAT_S = 2.0
SILENT_S = 20.0
"""A machine that has not been heard of for so long is gone: one could wait for it for ever."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

NETWORK_S = 60.0
"""How long one of several machines waits for a network."""
LOOK_S = 0.5
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that are nobody's (RFC 5737, RFC 3849): the way to them is the way to everywhere."""


def set_addresses(options: Any, max_nodes: int) -> None:
    """Fills in what torchrun and gloo would guess from the machine's name, which other machines often cannot resolve,
    and which this one often takes for loopback.

    The address of this machine is the one from which it reaches the rendezvous: it becomes `--local-addr`, and its
    interface GLOO_SOCKET_IFNAME. What the user has set stays. On one machine all is loopback, which needs no network.

    Raises TrainingError when this machine, one of several, has found no address that others could reach after
    `NETWORK_S`; ConfigError when GLOO_SOCKET_IFNAME keeps them to loopback.
    """
    several = max_nodes > 1
    host, port = _read_endpoint(options) if several else ("127.0.0.1", 1)
    own, target = _find_lasting_address(host, port, NETWORK_S if several and options.local_addr is None else 0.0)
    addresses = [address for address in (_resolve(options.local_addr), own) if address is not None]
    if several and addresses and not addresses[0].is_loopback:
        _refuse_loopback_interface()
    if options.local_addr is None and own is not None:
        options.local_addr = str(own)
    if GLOO_INTERFACE not in os.environ and (name := next(filter(None, map(_find_interface, addresses)), None)):
        os.environ[GLOO_INTERFACE] = name
    if several and options.rdzv_backend == "c10d":
        words = [options.rdzv_conf] if options.rdzv_conf else []
        if "read_timeout" not in options.rdzv_conf:
            words.append(f"read_timeout={SILENT_S:.0f}")
        is_here = own is not None and own == target and not own.is_loopback
        is_host = None if "is_host" in options.rdzv_conf else _judge_host(host, is_here)
        if is_host is not None:
            words.append(f"is_host={str(is_host).lower()}")
        options.rdzv_conf = ",".join(words)


def _read_endpoint(options: Any) -> tuple[str, int]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if options.rdzv_endpoint:
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, 29400)
        return host, port
    return options.master_addr, options.master_port or 29500


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _find_lasting_address(host: str, port: int, patience_s: float) -> tuple[Address | None, Address | None]:
    """The address of this machine that others reach, and that of `host`; loopback only where `host` says loopback.

    A network may come up after the job has begun: it is waited for. Where nothing is waited for and nothing is found,
    None; else TrainingError.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            own, target = _find_own_address(host, port)
            if not own.is_loopback or _names_loopback(host):
                return own, target
            # `host` is this machine: its name stands in its own /etc/hosts as 127.0.1.1.
            if outward := _find_outward_address():
                return outward, outward
            why = f"{host} is {own} here, and no interface leads out"
        except OSError as error:
            why = error.strerror or str(error)
        if patience_s == 0:
            return None, None
        if time.monotonic() >= end:
            raise TrainingError(
                f"in {patience_s:.0f} s this machine found no address of its own that the others could reach: {why}",
                where=f"rendezvous {host}:{port}",
                hint="give it with --local-addr ADDRESS; where all are on this machine, the endpoint is localhost",
            )
        time.sleep(LOOK_S)


def _find_own_address(host: str, port: int) -> tuple[Address, Address]:
    """The address from which this machine reaches `host`, and that of `host`. Nothing is sent. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own, target = probe.getsockname()[0], probe.getpeername()[0]
        return _parse(own), _parse(target)


def _resolve(name: str | None) -> Address | None:
    if name is not None:
        with contextlib.suppress(OSError):
            return _find_own_address(name, 1)[1]
    return None


def _parse(address: str) -> Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _find_outward_address() -> Address | None:
    """The address of this machine on the way to everywhere; without such a way, the only one that leaves it."""
    for elsewhere in ELSEWHERE:
        with contextlib.suppress(OSError):
            own, _ = _find_own_address(elsewhere, 1)
            if not own.is_loopback:
                return own
    import psutil

    running = {name for name, interface in psutil.net_if_stats().items() if interface.isup}
    found = [
        _parse(address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in running and address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    found = [address for address in found if not address.is_loopback and not address.is_link_local]
    return found[0] if len(found) == 1 else None


def _names_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _find_interface(own: Address) -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == str(own) for address in addresses):
            return name
    return None


def _refuse_loopback_interface() -> None:
    chosen = os.environ.get(GLOO_INTERFACE, "")
    if _find_interface(ipaddress.IPv4Address("127.0.0.1")) in [name for name in chosen.split(",") if name]:
        raise ConfigError(
            "no other machine reaches this one there",
            where=f"{GLOO_INTERFACE}={chosen}",
            hint=f"unset {GLOO_INTERFACE}: the interface that leads to the rendezvous is found",
        )


def _judge_host(host: str, is_here: bool) -> bool | None:
    """Whether this machine holds the rendezvous; None where torch sees that by itself. It compares names, and fails on
    a machine that cannot resolve its own."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    try:
        is_seen = _matches_machine_hostname(host)
    except OSError:
        return is_here
    return True if is_here and not is_seen else None


class Pulse:
    """Tells the other machines that this one is alive, hears of them through the rendezvous' store, and calls
    `on_silence(what)`, in a thread of its own, when one has not been heard of for `SILENT_S`.

    The launcher's main thread may be stuck in a call to a machine that is gone; so may the thread that beats, which is
    why another one watches. Each machine listens to the first one; the first one listens to all, and tells.
    """

    def __init__(self, store: Any, group_rank: int, group_size: int, on_silence: Callable[[str], None]) -> None:
        self._store = store.clone()  # a connection of its own: the main thread's may be waiting
        with contextlib.suppress(Exception):
            self._store.set_timeout(timedelta(seconds=SILENT_S))
        self._me, self._size, self._on_silence = group_rank, group_size, on_silence
        self._counts: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._talked = time.monotonic()
        self._verdict = ""
        self._over = threading.Event()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name=f"optune{work.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Ends without waiting; the other machines are not told."""
        self._over.set()

    def _beat(self) -> None:
        while not self._over.is_set():
            try:
                self._talk()
            except Exception:
                # A store that is gone answers at once, one behind a cut line not at all: the watch decides.
                self._over.wait(BEAT_S)
                continue
            self._talked = time.monotonic()
            self._over.wait(BEAT_S)

    def _talk(self) -> None:
        self._store.add(_key(self._me), 1)
        now = time.monotonic()
        for other in range(1, self._size) if self._me == 0 else [0]:
            count = self._store.add(_key(other), 0)
            if count != self._counts.get(other):
                self._counts[other], self._heard[other] = count, now
        if self._verdict and self._me == 0:
            self._store.set("optune/silent", self._verdict)
        elif self._me and self._store.check(["optune/silent"]):
            self._verdict = self._store.get("optune/silent").decode()

    def _watch(self) -> None:
        while not self._over.wait(BEAT_S / 4):
            now = time.monotonic()
            silent = [other for other, heard in self._heard.items() if now - heard > SILENT_S]
            if now - self._talked > SILENT_S:
                what = f"the machine that holds the rendezvous has not answered for {SILENT_S:.0f} s"
            elif silent:
                what = f"machine {silent[0]} of {self._size} has not answered for {SILENT_S:.0f} s"
            elif self._verdict:
                what = self._verdict
            else:
                continue
            if self._me == 0 and not self._verdict:
                self._verdict = what
                self._over.wait(BEAT_S)  # so that it is told
            self._on_silence(what)
            return


def _key(group_rank: int) -> str:
    return f"optune/beat/{group_rank}"

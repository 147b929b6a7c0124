"""Two hosts on this machine, as Linux's network namespaces, with a link that can be cut.

Each host has an address of its own and sees nothing of this machine's network. A third namespace is
the switch between them. A cut is a port of the switch that goes down: packets are lost and nobody
is told, as when a cable is pulled. Only root may do this.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

HEAD, OTHER = "10.77.0.1", "10.77.0.2"
_CLONE_NEWNET = 0x40000000
_END_TIMEOUT_S = 10.0


class NotPossible(Exception):
    """This machine or this user cannot have network namespaces."""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace, and the programs that were started in it."""

    namespace: str
    address: str
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program, with its output at the end of the file `log`."""
        words = ["ip", "netns", "exec", self.namespace, *command]
        with log.open("ab") as output:
            program = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        self.programs.append(program)
        return program

    def processes(self) -> list[int]:
        """All processes in the namespace."""
        told = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True
        )
        return [int(pid) for pid in told.stdout.split()]

    def enter(self) -> None:
        """Have this process be on the host, before it starts any thread."""
        with Path("/run/netns", self.namespace).open("rb") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")


@dataclass(frozen=True, slots=True)
class TwoHosts:
    head: Host
    other: Host
    switch: str

    def cut(self) -> None:
        _ip("-n", self.switch, "link", "set", "other", "down")

    def restore(self) -> None:
        _ip("-n", self.switch, "link", "set", "other", "up")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """The hosts. At the end all processes in them are killed. Raises `NotPossible`."""
    if os.geteuid():
        raise NotPossible("network namespaces need root: run this with sudo")
    if shutil.which("ip") is None:
        raise NotPossible("needs the program `ip` (Debian: apt-get install iproute2)")
    mark = f"gemserve-{os.getpid()}"
    hosts = TwoHosts(Host(f"{mark}-head", HEAD), Host(f"{mark}-other", OTHER), f"{mark}-switch")
    names = [hosts.head.namespace, hosts.other.namespace, hosts.switch]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", hosts.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hosts.switch, "link", "set", "bridge", "up")
        for port, host in (("head", hosts.head), ("other", hosts.other)):
            ends = ["netns", host.namespace, "type", "veth", "peer", "name", port]
            _ip("link", "add", "net", *ends, "netns", hosts.switch)
            _ip("-n", hosts.switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "net")
            _ip("-n", host.namespace, "link", "set", "net", "up")
        yield hosts
    finally:
        _end((hosts.head, hosts.other))
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    ran = subprocess.run(["ip", *words], capture_output=True, text=True)
    if ran.returncode:
        raise NotPossible(f"ip {' '.join(words)}: {ran.stderr.strip()}")


def _end(hosts: Sequence[Host]) -> None:
    """Kill what runs on the hosts, but this process."""
    ends_s = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < ends_s:
        pids = {pid for host in hosts for pid in host.processes()} - {os.getpid()}
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    for host in hosts:
        for program in host.programs:
            program.wait(_END_TIMEOUT_S)

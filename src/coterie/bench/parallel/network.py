"""Several hosts on one machine: a network namespace for each rank, its link shaped in both directions.

Each namespace has one interface, `eth0`, whose other end is a port of its node's bridge. A token bucket on both ends
limits what the rank sends and gets. The bridges of two nodes are joined by one more pair, shaped the same way: the
uplink. All that is made carries the prefix `cotb`; what an earlier run left behind is removed before anything is made.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from coterie.errors import BackendUnavailable, ConfigError
from coterie.topology import Topology

PREFIX = "cotb"
BURST_BYTES = 32 * 1024  # more would let the start of an exchange pass unlimited
QUEUE_BYTES = 16 * 2**20  # room for all that all ranks send to one: nothing is dropped, so TCP never waits to resend
# a link that rested while experts computed must not start slowly again; nothing but the benchmark may be counted
_SETTINGS = (
    "net.ipv4.tcp_slow_start_after_idle=0", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv4.tcp_congestion_control=reno",
)  # fmt: skip
QUEUE_PACKETS = 10_000
TURN_BYTES = 8 * 1024
_SUBNET = "10.213.77"
_LOCK = Path("/run/lock/coterie-bench-parallel.lock")


@dataclass(frozen=True)
class Rates:
    """How fast links are, in bytes per second and direction.

    Attributes:
        device: a rank's own link.
        uplink: between the two nodes; None: as fast as the machine.
    """

    device: float
    uplink: float | None = None


def unavailable() -> str | None:
    """Why namespaces cannot be made here, or None when they can."""
    if os.geteuid() != 0:
        return "it makes network namespaces, which needs root"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if lacking:
        return f"it makes network namespaces, which needs {' and '.join(lacking)} (Debian: apt-get install iproute2)"
    return None


@contextmanager
def network(topology: Topology) -> Iterator[Network]:
    """One namespace for each device, on one or two bridges; all of it is removed when the block ends, however it ends.

    Raises:
        BackendUnavailable: without root, ip or tc, or where the kernel refuses.
        ConfigError: for more than two nodes or 250 devices, or while another benchmark runs.
    """
    reason = unavailable()
    if reason is not None:
        raise BackendUnavailable(reason)
    if topology.num_nodes > 2 or topology.num_devices > 250:
        raise ConfigError(f"topology {topology}: the emulated network has at most 2 nodes and 250 devices")
    with _alone(), _terminated():
        remove_leftovers()
        made = Network(topology)
        try:
            made.build()
            yield made
        finally:
            remove_leftovers()


class Network:
    """What `network` yields."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def build(self) -> None:
        """Make bridges, namespaces and pairs; links are not limited yet."""
        nodes = self.topology.num_nodes
        for node in range(nodes):
            _ip("link", "add", _bridge(node), "type", "bridge")
            _ip("link", "set", _bridge(node), "up")
        if nodes == 2:
            _ip("link", "add", f"{PREFIX}j0", "type", "veth", "peer", "name", f"{PREFIX}j1")
            for node in range(2):
                _ip("link", "set", f"{PREFIX}j{node}", "master", _bridge(node), "up")
        for rank, node in enumerate(self.topology.node_of_device()):
            _ip("netns", "add", _space(rank))
            _ip("link", "add", _port(rank), "type", "veth", "peer", "name", "eth0", "netns", _space(rank))
            _ip("link", "set", _port(rank), "master", _bridge(int(node)), "up")
            _ip("-n", _space(rank), "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", _space(rank), "link", "set", device, "up")
            _run("ip", "netns", "exec", _space(rank), "sysctl", "-qw", *_SETTINGS)

    def shape(self, rates: Rates) -> None:
        """Set the rates of all links, at any time."""
        for rank in range(self.topology.num_devices):
            _limit(_port(rank), rates.device)
            self._share(rank, rates.device)
        if self.topology.num_nodes == 2:
            for node in range(2):
                _limit(f"{PREFIX}j{node}", rates.uplink)

    def _share(self, rank: int, rate: float) -> None:
        """Limit what leaves a namespace, with turns between destinations.

        First come, first served would send a whole message to one rank before the next begins, and the ranks that wait
        for theirs would leave their own links idle; devices with a port to each other do not do that.
        """
        space, device = ["-n", _space(rank)], ["dev", "eth0"]
        others = [other for other in range(self.topology.num_devices) if other != rank]
        subprocess.run(["tc", *space, "qdisc", "del", *device, "root"], capture_output=True, check=False)
        _run("tc", *space, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "1")
        _run("tc", *space, "class", "add", *device, "parent", "1:", "classid", "1:ffff", "htb", *_rate(rate))
        for other in others:
            number = f"1:{other + 1:x}"
            part = _rate(rate / len(others), rate)
            _run("tc", *space, "class", "add", *device, "parent", "1:ffff", "classid", number, "htb", *part)
            _run("tc", *space, "qdisc", "add", *device, "parent", number, "pfifo", "limit", str(QUEUE_PACKETS))
            _run(
                "tc", *space, "filter", "add", *device, "parent", "1:", "protocol", "ip", "prio", "1", "u32",
                "match", "ip", "dst", f"{self.address(other)}/32", "flowid", number,
            )  # fmt: skip

    @staticmethod
    def address(rank: int) -> str:
        """The address of a rank."""
        return f"{_SUBNET}.{rank + 1}"

    def start(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], errors: IO[str]
    ) -> subprocess.Popen[str]:
        """Start a process in the rank's namespace; lines go in and out, Ctrl-C does not reach it."""
        return subprocess.Popen(
            ["ip", "netns", "exec", _space(rank), *command],
            env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, start_new_session=True,
        )  # fmt: skip

    def sent_bytes(self) -> list[int]:
        """Bytes that each rank has sent so far, by its interface's own counter (headers included)."""
        return [_counter(_port(rank), "rx_bytes") for rank in range(self.topology.num_devices)]

    def uplink_bytes(self) -> list[int]:
        """Bytes that each node has sent over the uplink so far; empty with one node."""
        nodes = self.topology.num_nodes
        return [_counter(f"{PREFIX}j{node}", "tx_bytes") for node in range(nodes if nodes > 1 else 0)]


def remove_leftovers() -> None:
    """Remove every namespace and interface with our prefix."""
    spaces = _run("ip", "netns", "list").split()
    for name in re.findall(rf"^\d+: ({PREFIX}[a-z]\d+)", _run("ip", "link", "show"), flags=re.MULTILINE):
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)  # a pair goes with its first end
    for name in spaces:
        if re.fullmatch(rf"{PREFIX}\d+", name):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _limit(device: str, rate: float | None, space: str | None = None) -> None:
    """Limit what leaves by an interface; None: no limit."""
    inside = [] if space is None else ["-n", space]
    if rate is None:
        subprocess.run(["tc", *inside, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
        return
    _run(
        "tc", *inside, "qdisc", "replace", "dev", device, "root", "tbf",
        "rate", f"{round(8 * rate)}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES),
    )  # fmt: skip


def _rate(rate: float, most: float | None = None) -> list[str]:
    """A class's share of a link, and what it may take when others leave room; bytes per second."""
    top = f"{round(8 * (rate if most is None else most))}bit"
    burst = ["burst", str(BURST_BYTES), "cburst", str(BURST_BYTES), "quantum", str(TURN_BYTES)]
    return ["rate", f"{round(8 * rate)}bit", "ceil", top, *burst]


def _bridge(node: int) -> str:
    return f"{PREFIX}n{node}"


def _space(rank: int) -> str:
    return f"{PREFIX}{rank}"


def _port(rank: int) -> str:
    return f"{PREFIX}h{rank}"


def _counter(device: str, name: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/{name}").read_text())


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise BackendUnavailable(f"the kernel refused `{' '.join(command)}`: {reason}; an emulated network needs this")
    return done.stdout


@contextmanager
def _alone() -> Iterator[None]:
    """One benchmark at a time: a second would remove what the first has made."""
    with _LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError("another parallel benchmark runs on this machine; wait for it to end") from None
        yield


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that what was made is removed."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""Hosts on one machine: Linux network namespaces, joined by a switch, whose links can fail.

Needs root, `ip`, `nft` to drop packets, and `tc` to slow a link down. Each host has an address of its own, 10.77.0.10
and up, a host name, `node0` and up, and an `/etc/hosts`. Nothing that is sent leaves these namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

NAMES = ("good", "debian", "loopback", "none", "ipv6")
"""What a host's own name stands for in its `/etc/hosts`: its address, 127.0.1.1 (as on Debian), 127.0.0.1, nothing.

Where it is "ipv6", the hosts have no other addresses than those of IPv6.
"""


WIRES = str(Path(__file__).with_name("wire.py"))


def missing(commands: tuple[str, ...] = ("ip", "unshare")) -> str:
    """Return what this machine lacks for simulated hosts; empty if nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root: hosts are network namespaces"
    lacks = [name for name in commands if shutil.which(name) is None]
    if lacks:
        return f"needs the commands {', '.join(lacks)} (Debian: iproute2, nftables, util-linux)"
    probe = f"lockstep-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return "" if made.returncode == 0 else f"cannot make network namespaces here: {made.stderr.decode().strip()}"


class Hosts:
    """Some hosts, from when they are made to :meth:`close`, which ends all processes on them."""

    def __init__(self, count: int, names: str = "good", delay: float | None = None) -> None:
        """With ``delay`` each packet takes so many seconds to another host: no link of these can fail, or be slow."""
        self.count, self._names = count, names
        self._prefix = f"lockstep-{os.getpid()}-"
        self._started: list[subprocess.Popen[bytes]] = []
        _ip("netns", "add", self._switch)
        for host in range(count):
            _ip("netns", "add", self._space(host))
        if delay is None:
            self._join_by_switch()
        else:
            self._join_by_wires(delay)
        bits, more = ("64", ("nodad",)) if names == "ipv6" else ("24", ())
        for host in range(count):
            space = self._space(host)
            _ip("-n", space, "address", "add", f"{self.address(host)}/{bits}", "dev", "eth0", *more)
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            self._write_names(host)

    def _join_by_switch(self) -> None:
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for host in range(self.count):
            peer = ("peer", "name", "eth0", "netns", self._space(host))
            _ip("-n", self._switch, "link", "add", f"to{host}", "type", "veth", *peer)
            _ip("-n", self._switch, "link", "set", f"to{host}", "master", "switch", "up")

    def _join_by_wires(self, delay: float) -> None:
        ends = [f"{self.address(host)}={self._space(host)}" for host in range(self.count)]
        wires = subprocess.Popen([sys.executable, WIRES, str(delay), *ends], stdout=subprocess.PIPE)
        self._started.append(wires)
        self._wires = wires
        assert wires.stdout is not None
        if wires.stdout.readline() != b"ready\n":
            raise RuntimeError("there are no wires with a delay: they need /dev/net/tun")

    def close(self) -> None:
        """End all processes on the hosts, and take the hosts down."""
        for host in range(self.count):
            for pid in _ip("netns", "pids", self._space(host)).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in self._started:
            process.kill()
            process.wait()
        for host in range(self.count):
            _ip("netns", "del", self._space(host))
            shutil.rmtree(_settings(self._space(host)), ignore_errors=True)
        _ip("netns", "del", self._switch)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"fd77::{10 + host}" if self._names == "ipv6" else f"10.77.0.{10 + host}"

    def start(self, host: int, command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """A process on a host, in a session of its own, which writes to a file."""
        cleared = ("GLOO", "MASTER", "RANK", "WORLD", "LOCAL_", "TORCHELASTIC")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(cleared)}
        named = ["unshare", "--uts", "sh", "-c", f'hostname node{host}; exec "$@"', "sh", *command]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._space(host), *named],
                env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def trips(self) -> dict[str, int]:
        """End the wires; return the trips that they had counted on a host when it sent a mark, by the text of the mark:
        two for each round trip that something had to wait for. If hosts have sent the same mark, the most of them."""
        self._wires.terminate()
        said, _ = self._wires.communicate()
        found: dict[str, int] = {}
        for text, count in (line.rsplit(" ", 1) for line in said.decode().splitlines()):
            found[text] = max(int(count), found.get(text, 0))
        return found

    # ------------------------------------------------------------------------------ what can happen

    def pull_cable(self, host: int) -> None:
        """Take down the port of the switch: nothing comes or goes, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"to{host}", "down")

    def plug_cable(self, host: int) -> None:
        """Take the port up again."""
        _ip("-n", self._switch, "link", "set", f"to{host}", "up")

    def drop(self, host: int, direction: str) -> None:
        """Drop what comes to a host ("input"), or what it sends ("output")."""
        self._filter(host, direction, f"{'iifname' if direction == 'input' else 'oifname'} eth0")

    def part(self, host: int, other: int) -> None:
        """Drop what two hosts send to each other; both still reach all others."""
        version = "ip6" if self._names == "ipv6" else "ip"
        self._filter(host, "input", f"{version} saddr {self.address(other)}")
        self._filter(other, "input", f"{version} saddr {self.address(host)}")

    def _filter(self, host: int, direction: str, packets: str) -> None:
        rules = f"""
            table inet failures {{
                chain {direction} {{
                    type filter hook {direction} priority 0;
                    {packets} drop
                }}
            }}
        """
        subprocess.run(["ip", "netns", "exec", self._space(host), "nft", "-f", "-"], input=rules.encode(), check=True)

    def slow_down(self, host: int, megabits: int) -> None:
        """Send so many megabits a second from a host, and no more."""
        limit = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms"]
        _ip("netns", "exec", self._space(host), "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)

    # ------------------------------------------------------------------------------------- machinery

    @property
    def _switch(self) -> str:
        return f"{self._prefix}switch"

    def _space(self, host: int) -> str:
        return f"{self._prefix}node{host}"

    def _write_names(self, host: int) -> None:
        own = {"debian": "127.0.1.1", "loopback": "127.0.0.1", "none": ""}.get(self._names, self.address(host))
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.address(other)} node{other}" for other in range(self.count) if other != host]
        lines += [f"{own} node{host}"] if own else []
        folder = _settings(self._space(host))
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


def _settings(space: str) -> Path:
    """Return what `ip netns exec` lays over /etc."""
    return Path("/etc/netns") / space


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout

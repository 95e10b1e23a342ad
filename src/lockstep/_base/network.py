"""The identity of this host, and the address under which ranks of other hosts reach it."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import OptionError

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable in which a user names the interfaces for Gloo, and for this library."""

SET_INTERFACE = f"set {INTERFACE_VARIABLE} on each host to the interface that leads to the others, such as eth0"
"""Advice for when an address of this host is of no use to other hosts."""

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_ADDRESS_AT = 20  # bytes into the answer
_LINK_LOCAL = ipaddress.ip_network("fe80::/10")
_IPV6_TABLE = Path("/proc/net/if_inet6")
_DESCRIPTORS = range(1 << 31)


def host_identity() -> str:
    """Return a text that is the same for processes that can share memory, and different otherwise."""
    if sys.platform != "linux":
        return socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{machine}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def is_loopback(ip: str) -> bool:
    """Return True if an address is one at which no other host reaches this one."""
    return ipaddress.ip_address(ip).is_loopback


def is_own(ip: str) -> bool:
    """Return True if an address belongs to this host."""
    with contextlib.suppress(OSError), socket.socket(family_of(ip), socket.SOCK_DGRAM) as probe:
        probe.bind((ip, 0))
        return True
    return False


def family_of(ip: str) -> socket.AddressFamily:
    """Return the family of sockets for an address."""
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def addresses_of_host(name: str) -> list[str]:
    """Return the addresses of a host, given by name or address; raises ``OSError`` if it is unknown."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def address_towards(host: str) -> str | None:
    """Return the address of this host from which packets to another host leave; nothing is sent.

    None if that host's name cannot be resolved, or no route leads there.
    """
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return None


def chosen_address() -> str | None:
    """Return the address of the interface that the user has chosen by ``GLOO_SOCKET_IFNAME``, if that is set; raise
    :class:`OptionError` if there is no such interface."""
    chosen = list(filter(None, os.environ.get(INTERFACE_VARIABLE, "").split(",")))
    found = next((addresses[0] for addresses in map(addresses_of, chosen) if addresses), None)
    there = [name for _, name in socket.if_nameindex()]
    if chosen and found is None and not {*chosen} <= {*there}:
        raise OptionError(
            f"{INTERFACE_VARIABLE} is {','.join(chosen)!r}, but this host has no such interface: it has "
            f"{', '.join(there)}; {SET_INTERFACE}"
        )
    return found


def addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface: first IPv4, then those IPv6 addresses that other hosts can use."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4]))
    with contextlib.suppress(OSError):
        for line in _IPV6_TABLE.read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if name == interface and address not in _LINK_LOCAL:
                found.append(str(address))
    return found


def interface_of(ip: str) -> str | None:
    """Return the name of the interface that has an address."""
    return next((name for _, name in socket.if_nameindex() if ip in addresses_of(name)), None)


def address_of_own_name() -> str | None:
    """Return the address that this host's own name resolves to, which Gloo uses; None if it does not resolve."""
    with contextlib.suppress(OSError):
        return addresses_of_host(socket.gethostname())[0]
    return None


def own_name_is_reachable() -> bool:
    """Return True if other hosts reach this one at the address that its own name resolves to.

    They do not on Debian and Ubuntu, whose ``/etc/hosts`` gives it 127.0.1.1.
    """
    own = address_of_own_name()
    return own is not None and not is_loopback(own) and is_own(own)


def address_for_gloo(others: Iterable[str]) -> str | None:
    """Return the address at which Gloo has to listen so that other hosts, given by addresses, reach it.

    None if Gloo finds one itself: by ``GLOO_SOCKET_IFNAME``, or by the host's own name.
    """
    if INTERFACE_VARIABLE in os.environ or own_name_is_reachable():
        return None
    return reachable_address(others)


def reachable_address(others: Iterable[str]) -> str | None:
    """Return an address of this host at which others reach it, given the addresses of some of them.

    It is that of the interface that the user has chosen, else the one from which packets to the others leave.
    """
    chosen = chosen_address()
    if chosen is not None:
        return chosen
    towards = map(address_towards, others)
    return next((each for each in towards if each is not None and not is_loopback(each)), None)


def shut_down_in(thread: int, port: int) -> None:
    """Shut down the socket on which a thread waits for a peer, if that has this ``port``: what waits in C++ raises.

    ``thread`` is the system's number of it. Does nothing on systems without ``/proc``.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, OverflowError):  # it waits for something else
        number = int(Path(f"/proc/self/task/{thread}/syscall").read_text().split()[1], 16)
        if number not in _DESCRIPTORS:  # an address, as in poll(): what is there begins with the descriptor
            with open("/proc/self/mem", "rb", buffering=0) as memory:  # fails where the thread's stack is gone
                memory.seek(number)
                number = int.from_bytes(memory.read(4), sys.byteorder)
        with socket.socket(fileno=os.dup(number)) as waited_for:
            if waited_for.getpeername()[1] == port:
                waited_for.shutdown(socket.SHUT_RDWR)

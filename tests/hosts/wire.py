"""Links with a delay between hosts: carries each packet some time after it was sent, and counts trips.

``python wire.py SECONDS ADDRESS=SPACE ...``: makes the device eth0 (TUN) in the network namespace of each host, says
"ready", and carries packets of IPv4 between these addresses until it is ended. (Where the kernel has it, `tc qdisc add
... netem` delays, too, and does not count.)

Trips are counted as by Lamport's clocks: a packet takes along the count of its sender, and one more. So what a host
waits for one after the other adds up, what is on its way side by side does not, and how busy the machine is does not
matter. Acknowledgements alone are not counted: programs do not wait for them. A host that sends a text to the port
MARK of another one, over UDP, makes this say that text and the host's count, on a line of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LONGEST = 1 << 16
_SOURCE, _DESTINATION = slice(12, 16), slice(16, 20)  # of the header of IPv4
_TCP, _UDP = 6, 17
_FIN_SYN_RST = 0b111
MARK = 9
"""A port of UDP, at which nobody listens."""


def device_in(space: str) -> int:
    """Make eth0 in a network namespace; return its descriptor. This process stays in the namespace."""
    found = os.open(f"/run/netns/{space}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(found, 0):
        raise OSError(ctypes.get_errno(), f"setns to {space}")
    os.close(found)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return device


def carry(devices: dict[bytes, int], seconds: float) -> None:
    """Carry packets between devices, by the addresses to which they go."""
    poll = select.poll()
    for device in devices.values():
        poll.register(device, select.POLLIN)
    under_way: list[tuple[float, int, bytes, int]] = []
    number, trips = 0, dict.fromkeys(devices, 0)
    while True:
        left = max(0.0, under_way[0][0] - time.monotonic()) * 1e3 if under_way else None
        for device, _ in poll.poll(left):
            packet = os.read(device, _LONGEST)
            number += 1
            known = trips.get(packet[_SOURCE], 0)
            if (text := mark(packet)) is not None:
                print(f"{text} {known}", flush=True)
                continue
            heapq.heappush(under_way, (time.monotonic() + seconds, number, packet, known + 1))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, packet, trip = heapq.heappop(under_way)
            to = packet[_DESTINATION]
            if to in devices:
                if says_something(packet):
                    trips[to] = max(trips[to], trip)
                os.write(devices[to], packet)


def mark(packet: bytes) -> str | None:
    """Return the text of a packet that is a mark."""
    header = 4 * (packet[0] & 0xF)
    if packet[9] == _UDP and int.from_bytes(packet[header + 2 : header + 4]) == MARK:
        return packet[header + 8 :].decode()
    return None


def says_something(packet: bytes) -> bool:
    """Return False for an acknowledgement alone."""
    header = 4 * (packet[0] & 0xF)
    if packet[9] != _TCP:
        return True
    has_data = int.from_bytes(packet[2:4]) > header + 4 * (packet[header + 12] >> 4)
    return has_data or bool(packet[header + 13] & _FIN_SYN_RST)


if __name__ == "__main__":
    hosts = [each.split("=") for each in sys.argv[2:]]
    joined = {socket.inet_aton(address): device_in(space) for address, space in hosts}
    print("ready", flush=True)
    carry(joined, float(sys.argv[1]))

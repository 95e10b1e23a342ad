"""The failure channel: what one rank tells, or leaves behind, is what all others raise. Ranks are threads here."""

import contextlib
import dataclasses
import errno
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep._base import telling
from lockstep._base.store import BoundedStore
from lockstep.errors import CommunicationError, PeerFailure
from lockstep.failures import channel as failure_channel
from lockstep.failures.channel import FailureChannel
from lockstep.failures.failure import Failure, Kind, of_exception
from lockstep.failures.hosts import Hosts
from lockstep.failures.messenger import Messenger
from lockstep.failures.progress import Progress, Snapshot
from lockstep.failures.ring import Connection, Meeting, Place, encoded
from programs.ranks import on_ranks
from threaded import run_ranks

SOON = 30.0  # ends what hangs


stores = []  # kept: pages of earlier tests, which last until they are collected, are told apart by their store


def channel(store, rank, timeout=SOON):
    stores.append(store)
    progress = Progress(f"test {id(store)}", rank.rank, rank.world)
    return FailureChannel(dist.PrefixStore("test", store), rank.rank, range(rank.world), progress, "here", timeout)


@contextlib.contextmanager
def met(store, rank):
    """A rank's channel, which it leaves in good order when all others do."""
    this = channel(store, rank)
    yield this
    this.announce_end()
    assert this.wait_for_others(SOON)
    this.close()


def raised(this):
    """The failure that the channel raises, when there is one."""
    assert this._known.wait(SOON)
    with pytest.raises(PeerFailure) as caught:
        this.check()
    return caught.value


def not_met(store, rank, errors=PeerFailure, **options):
    """The error with which a rank does not meet the others."""
    with pytest.raises(errors) as caught:
        channel(store, rank, **options)
    return caught.value


@pytest.fixture
def nobody_reads_on(monkeypatch):
    """A rank that fails before all have met does not live on for those who still read its store: it is the test's."""
    monkeypatch.setattr(failure_channel, "START_UP_SECONDS", 0.1)


@pytest.mark.parametrize(
    ("in_batches", "step", "place"),
    [
        (True, 12, "at or before step 12, noticed in backward"),
        (False, 12, "at or before step 13, noticed in backward"),
        (False, 0, "in backward"),
    ],
)
def test_an_error_that_a_device_reports_later_may_be_of_an_earlier_step(in_batches, step, place):
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    seen = Snapshot("run", 1, 1, 1, 2, step, "backward", 0.0, 0.0, "", 0.0, in_batches=in_batches)
    what = "torch.AcceleratorError: CUDA error: device-side assert triggered"
    assert of_exception(error, seen).summary == f"rank 1 failed {place}: {what}"


def all_have_met(rank):
    rank.gather(torch.ones(1))


@pytest.mark.parametrize("world", [2, 3, 5])
@on_ranks(None, "world")
def test_an_exception_of_one_rank_is_raised_on_all_others_with_its_traceback(rank, store):
    with met(store, rank) as this:
        all_have_met(rank)
        this.progress.step, this.progress.current_phase = 12, "forward"
        if rank.rank == 1:
            try:
                raise ValueError("of rank 1")
            except ValueError as error:
                this.report(of_exception(error, this.progress.read()))
            this.check()  # its own is not another's
            return
        failure = raised(this)
    assert (failure.rank, failure.step, failure.phase) == (1, 12, "forward")
    assert failure.reason == "ValueError: of rank 1"
    assert 'raise ValueError("of rank 1")' in failure.traceback
    assert f"rank {rank.rank} stops, because rank 1 failed after step 12, in forward: ValueError" in str(failure)


HUGE = {
    "one line": "of rank 1 " + "x" * 5_000_000,
    "lines": "of rank 1\n" * 500_000,
    "what takes most bytes": "of rank 1 " + "\N{GRINNING FACE}" * 1_000_000,
    "what UTF-8 does not have": "of rank 1 " + "\udce9" * 1_000_000,
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
@on_ranks(2)
def test_an_exception_with_a_huge_message_is_told_with_both_ends(rank, text, store):
    text += " the end"
    with met(store, rank) as this:
        all_have_met(rank)
        if rank.rank == 1:
            try:
                try:
                    raise ValueError(text)
                finally:
                    raise KeyError(text)
            except KeyError as error:
                this.report(of_exception(error, this.progress.read()))
            return
        failure = raised(this)
    assert failure.rank == 1
    assert failure.reason.startswith("ValueError: of rank 1")
    assert "(and while that was handled: KeyError: 'of rank 1" in failure.reason
    assert "characters left out" in failure.reason
    assert "the end" in failure.reason
    assert len(failure.reason) < 20_000
    assert "raise ValueError(text)" in failure.traceback
    assert failure.traceback.endswith("the end'")
    str(failure).encode()  # as whoever prints it does


def test_of_two_ranks_that_fail_at_once_one_is_the_first_for_all(store):
    have_met = threading.Barrier(4)

    def train(rank):
        with met(store, rank) as this:
            have_met.wait(SOON)
            if rank.rank in (1, 2):
                this.report(Failure(rank.rank, Kind.RAISED, 1, "forward", f"of rank {rank.rank}"))
            assert this._known.wait(SOON)
            return this.failure and this.failure.rank, this._log.read()[0].rank

    told = run_ranks(4, train)
    first = told[0][1]
    assert first in (1, 2)
    assert told == [(None if rank == first else first, first) for rank in range(4)]


@pytest.mark.parametrize("world", [2, 4])
@on_ranks(None, "world")
def test_a_rank_whose_connections_end_without_a_word_has_ended(rank, store):
    if rank.rank == 1:
        this = channel(store, rank)
        all_have_met(rank)
        this.progress.step, this.progress.current_phase = 3, "backward"
        this.close()
        return
    with met(store, rank) as this:
        all_have_met(rank)
        message = str(raised(this))
    assert message.startswith(f"rank {rank.rank} stops, because rank 1 has ended without a word")
    # The page is found by the number of the process, which these ranks share.
    assert message.endswith("after step 3, in backward")


@on_ranks(3)
def test_who_leaves_in_order_fails_for_nobody_but_those_who_wait_for_it(rank, store):
    with met(store, rank) as this:
        this.progress.step = 7
        if rank.rank == 1:
            this.announce_end()
            assert not this.wait_for_others(0.1)
        else:
            began = time.monotonic()
            with pytest.raises(PeerFailure, match=f"rank {rank.rank} stops, because rank 1 has left .* after step 7"):
                while time.monotonic() < began + SOON:
                    this.check()
                    this.check_waiting([2, 0], began)
                    this.check_waiting([0, 1, 2] if rank.rank == 0 else [], began)
                    time.sleep(0.01)
    assert (this.failure and this.failure.kind) == (Kind.LEFT, None, Kind.LEFT)[rank.rank]


@on_ranks(4)
def test_all_leave_in_order(rank, store):
    with met(store, rank) as this:
        pass
    assert this._messenger.close()  # its thread has ended
    assert (this.failure, this._log.entries) == (None, [])


def test_ranks_meet_and_leave_while_a_program_has_many_files_open(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < 4096:
        pytest.skip("this system allows fewer descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (number := os.open(os.devnull, os.O_RDONLY)) < 1024:
            stack.callback(os.close, number)
        stack.callback(os.close, number)

        def train(rank):
            with met(store, rank) as this:
                pass
            return this._messenger._listener.fileno()

        assert run_ranks(3, train) == [-1] * 3  # closed, at the very end


def meeting(store, rank, world):
    return Meeting(BoundedStore(dist.PrefixStore("test", store)), rank, range(world), "here", SOON)


@pytest.mark.usefixtures("nobody_reads_on")
@pytest.mark.parametrize(("world", "victim"), [(3, 1), (4, 3)])
@on_ranks(None, "world")
def test_a_rank_that_fails_before_all_have_met_is_named(rank, world, victim, store):
    if rank.rank == victim:
        meeting(store, victim, world).close()
        return
    error = not_met(store, rank)
    assert (error.rank, error.phase) == (victim, "start-up")


@pytest.mark.usefixtures("nobody_reads_on")
@on_ranks(3)
def test_a_rank_that_fails_before_its_previous_rank_has_come_is_named_by_the_next(rank, store):
    if rank.rank == 0:
        meeting(store, 0, 3).close()
    if rank.rank == 1:
        assert not_met(store, rank).rank == 0


@pytest.mark.parametrize("victim", [0, 2])
def test_if_the_store_fails_with_a_rank_no_other_rank_is_blamed(victim, monkeypatch):
    """The ranks that have noticed it tell the others over their connections, and those do not take their end for
    another failure."""
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port, has_met, start = servers[0].port, threading.Event(), Messenger.start

    def started(this):
        start(this)
        has_met.set()  # the rank opposite of the victim

    monkeypatch.setattr(Messenger, "start", started)

    def train(rank):
        store = dist.TCPStore("127.0.0.1", port)
        if rank.rank == victim:
            this = meeting(store, victim, 4)
            this._doors[0].setblocking(True)
            known = [this._doors[0].accept()[0] for _ in range(2)]  # of the previous rank, and the probe of the next
            assert has_met.wait(SOON)
            servers.clear()
            this.close()
            for each in known:
                each.close()
            return None
        return str(not_met(store, rank, (CommunicationError, PeerFailure)))

    told = run_ranks(4, train)
    for rank, message in enumerate(told):
        if rank != victim:
            named = message.startswith(f"rank {rank} stops, because rank {victim} has ended without a word")
            assert named or "that is rank 0, unless a launcher hosts it" in message, told


@pytest.fixture
def over():
    """For ranks that are threads."""
    return threading.Event()


@on_ranks(4)
def test_of_ranks_that_have_come_none_is_blamed_for_a_time_out(rank, store, over):
    if rank.rank == 2:  # listens, and does no more
        this = meeting(store, 2, 4)
        assert over.wait(SOON)
        this.close()
        return
    timeout = 0.3 if rank.rank == 0 else SOON  # rank 0 has met both of its neighbours
    error = not_met(store, rank, CommunicationError, timeout=timeout)
    over.set()
    told = "not all of 4 ranks had connected to each other after 0.3 s; look at the errors of all of them"
    assert str(error) == told


def test_what_is_read_before_it_is_wanted_is_received_later():
    here, there = socket.socketpair()
    connection, neighbour = Connection(here, 1, SOON), Connection(there, 0, SOON)
    neighbour.send(b"first")
    assert connection.unread() == [b"first"]
    neighbour.send(b"second")
    neighbour.close()
    assert connection.unread() == [b"first", b"second"]
    assert connection.receive() == ([b"first", b"second"], True)
    assert connection.receive() == ([], True)
    connection.close()


def test_messages_that_come_together_go_on_together_and_only_then_are_heard():
    (here, before), (there, after) = socket.socketpair(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    previous, following, neighbour = Connection(here, 0, SOON), Connection(there, 2, SOON), Connection(before, 1, SOON)
    after.setblocking(False)
    passed_on, heard = [], []

    def hear(message):
        heard.append(message["kind"])
        with contextlib.suppress(BlockingIOError):
            passed_on.append((after.recv(1000), heard.copy()))

    this = Messenger(1, [following, previous], None, hear, lambda connection: None, lambda: None)
    neighbour.send(*(encoded({"kind": f"{number}", "id": [0, number]}) for number in (1, 2, 2, 3)))
    this._receive(previous)
    assert heard == ["1", "2", "3"]
    ((packet, already_heard),) = passed_on
    assert (packet.count(b"kind"), already_heard) == (3, ["1"])
    this.close_connections()
    neighbour.close()
    after.close()


def test_who_waits_until_its_messages_are_sent_waits_for_those_that_are_queued():
    this = Messenger(0, [], None, print, print, print)
    this._changed.wait = lambda seconds: this._send_what_waits()
    this.send("left")
    this.wait_until_sent(SOON)
    assert not this._to_send
    this.close_connections()


@pytest.mark.usefixtures("nobody_reads_on")
@on_ranks(3)
def test_a_rank_that_fails_after_it_was_reached_is_named_while_others_have_not_come(rank, store, over):
    if rank.rank == 1:
        this = meeting(store, 1, 3)
        while this._listener is None:
            this._listen()
        this._listener.setblocking(True)
        this._listener.accept()[0].close()
        this.close()
    elif rank.rank == 2:
        assert over.wait(SOON)
    else:
        error = not_met(store, rank)
        over.set()
        assert (error.rank, error.phase) == (1, "start-up")


def test_a_link_that_is_lost_in_the_start_is_no_end_of_a_rank(store):
    here, other = meeting(store, 0, 2), meeting(store, 1, 2)
    here._listen()
    with socket.create_connection((here._own.ip, here._own.port)) as connected:
        link = Connection(connected, 1, SOON)
        link._note(OSError(errno.ETIMEDOUT, ""))
        error = here._lost(link)
    name = socket.gethostname()
    assert (error.rank, error.kind) == (1, Kind.UNREACHABLE)
    assert str(error) == f"rank 0, on {name}, has lost the connection to its host {name} (Connection timed out)"
    here.close()
    other.close()


@on_ranks(2)
def test_a_link_that_is_lost_before_a_rank_has_told_its_place_is_no_end_of_it(rank, store):
    with met(store, rank) as this:
        if rank.rank == 0:
            this.pages.clear()
            this._here.discard(1)
            this.places[1] = dataclasses.replace(this.places[1], host="another")
            this._tell_of_loss(1, OSError(errno.ETIMEDOUT, ""))
            failure = raised(this)
            assert failure.rank == 1
            assert "has heard nothing from" in failure.reason


@pytest.mark.parametrize(("gone", "ended"), [([2], [2]), ([2, 4], [2, 3, 4]), ([2, 3], [2, 3]), ([5], [5])])
def test_a_host_is_gone_if_both_of_its_ends_in_the_ring_are(gone, ended):
    hosts = Hosts(0, {rank: Place(host, "", 1, "") for rank, host in enumerate("aabbbc")}, print)
    this = SimpleNamespace(global_ranks=range(6), hosts=hosts, ended=set(), _gone=set(), _changed=threading.Condition())
    for rank in gone:
        FailureChannel._note_gone(this, rank)
    assert this.ended == set(ended)


@pytest.mark.usefixtures("nobody_reads_on")
@on_ranks(3)
def test_a_rank_that_does_not_come_is_named_after_the_time_out(rank, store):
    if rank.rank != 1:
        error = not_met(store, rank, CommunicationError, timeout=0.3)
        assert str(error).startswith("rank 1 of 3 did not come within 0.3 s")


def test_ranks_that_wait_say_for_whom(monkeypatch, caplog, store):
    monkeypatch.setattr(telling, "FIRST_SECONDS", 0.1)

    def train(rank):
        while rank.rank == 1 and len(caplog.messages) < 2:
            time.sleep(0.01)
        with met(store, rank):
            pass

    run_ranks(3, train)
    told = {text for text in caplog.messages if "to come" in text}
    assert told == {f"rank {rank} waits for rank 1 of 3 to come; ranks 0, 2 are here" for rank in (0, 2)}


@on_ranks(4)
def test_who_gives_up_first_is_not_taken_for_the_one_that_did_not_come(rank, store):
    if rank.rank == 3:
        return
    with pytest.raises((CommunicationError, PeerFailure)) as caught:
        this = channel(store, rank, timeout=0.3 if rank.rank == 2 else SOON)
        found = raised(this)  # it had met both of its neighbours
        this.close()
        raise found
    message = str(caught.value)
    assert "rank 3 of 4 did not come within 0.3 s" in message
    assert Failure(3, Kind.ABSENT, 0, "start-up", message).summary == message


def test_strangers_are_turned_away(store):
    here, other = meeting(store, 0, 2), meeting(store, 1, 2)
    here._listen()
    address = (here._own.ip, here._own.port)
    strangers = [Connection(socket.create_connection(address), 0, SOON) for _ in range(6)]
    strangers[0].send(encoded({"rank": 1, "secret": "a guess"}))
    strangers[1]._socket.send(b"\x04\0\0\0GET ")
    strangers[2]._socket.send(b"GET / HTTP/1.1\r\n\r\n")
    strangers[3]._socket.send(b"\x02\0\0\0[]")
    strangers[4]._socket.send(b"\x1e\0\0\0" + '{"rank": 1, "secret": "\xe9\xe9"}'.encode().ljust(30))
    with ThreadPoolExecutor() as pool:
        meets = pool.submit(other.connect, SOON, lambda: None)
        neighbours, listener, _ = here.connect(SOON, lambda: None)
        assert [each.place.pid for each in neighbours] == [os.getpid()] * 2  # known before they tell it themselves
        found, other_listener, _ = meets.result()
    assert [each.peer for each in neighbours] == [1, 1]
    neighbours[0].send(b"hello")
    heard = []
    until = time.monotonic() + SOON
    while not heard and time.monotonic() < until:
        heard += found[1].receive()[0]
    assert heard == [b"hello"]
    for each in (here, other, listener, other_listener, *strangers, *neighbours, *found):
        each.close()

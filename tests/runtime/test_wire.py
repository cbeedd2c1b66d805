"""Covers: _runtime/wire.py and _runtime/local/outbox.py, over real sockets."""

from __future__ import annotations

import contextlib
import socket
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from _support import beside
from hypothesis import given
from hypothesis import strategies as st
from test_staging import Pair

from torchpmap._runtime import wire
from torchpmap._runtime.local.outbox import Outbox
from torchpmap._runtime.wire import FrameError, FrameReader, Stream, frame, pack_ints, put_frame


def own_memory(kind, seq, length, given):
    return memoryview(bytearray(length))


@contextmanager
def connection(size=1 << 16, room=own_memory):
    """(our end, reader of the other end)."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, FrameReader(theirs, room, size)


def sending(end, *payloads):
    """Send from a second thread, then close: payloads may be larger than the socket takes."""

    def send():
        for payload in payloads:
            end.sendall(payload)
        end.close()

    return beside(send)


def read_frames(reader):
    """All whole frames up to the end of the stream."""
    frames = []
    with contextlib.suppress(EOFError):
        for kind, seq, body in reader.frames():
            frames.append((kind, seq, bytes(body)))
    return frames


FRAMES = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.integers(-(2**62), 2**62),
        st.binary(max_size=60).map(lambda b: 7 * b),
    ),
    max_size=8,
)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 2000), max_size=6), size=st.integers(24, 200))
def test_frames_arrive_however_the_bytes_are_cut(frames, cuts, size):
    stream = b"".join(frame(kind, seq, body) for kind, seq, body in frames)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    with connection(size) as (end, reader):
        for piece in pieces:
            end.sendall(piece)
        end.close()
        assert read_frames(reader) == frames


@pytest.mark.parametrize("length", [0, 1, 23, 24, 30, 30 + 99, 30 + 124])
def test_end_in_the_middle_of_a_frame(length):
    sent = [(1, 1, b"123456"), (2, 2, bytes(100))]
    with connection() as (end, reader):
        end.sendall(b"".join(frame(*each) for each in sent)[:length])
        end.close()
        assert read_frames(reader) == sent[: (length >= 30) + (length >= 154)]


@pytest.mark.parametrize("size", [0, 1, 24, 100, 1 << 20])
def test_a_large_body_goes_straight_to_its_place(size):
    payload = bytes(k % 251 for k in range(size))
    target = memoryview(bytearray(size))
    messages = (frame(9, 3, payload), frame(10, 4, b"next"))
    with connection(64, lambda *_: target) as (end, reader), sending(end, *messages):
        frames = reader.frames()
        kind, seq, body = next(frames)
        assert (kind, seq, body) == (9, 3, payload)
        assert (body is target) is (size > 40)
        assert next(frames) == (10, 4, b"next")


def test_a_body_without_memory_is_skipped():
    """Whatever it holds."""

    def room(kind, seq, length, given):
        assert (kind, length, bytes(given)) == (9, 1000, body[: len(given)])
        raise MemoryError

    body = frame(11, 7, b"no frame") * 50
    messages = (frame(8, 2, b"before"), frame(9, 3, body[:1000]), frame(10, 4, b"next"))
    with connection(64, room) as (end, reader), sending(end, *messages):
        frames = reader.frames()
        assert next(frames) == (8, 2, b"before")
        with pytest.raises(MemoryError):
            next(frames)
        assert reader.head == (9, 3, 1000)
        assert read_frames(reader) == [(10, 4, b"next")]


def test_a_reader_that_does_not_wait_ends_when_nothing_is_there_or_it_has_read_enough():
    with connection() as (end, reader):
        assert list(reader.frames(socket.MSG_DONTWAIT)) == []
        end.sendall(frame(1, 1, bytes(11)) + frame(2, 2)[:-1])
        assert [kind for kind, *_ in reader.frames(most=1)] == [1]
        end.sendall(frame(2, 2)[-1:])
        assert [kind for kind, *_ in reader.frames(socket.MSG_DONTWAIT)] == [2]


@pytest.mark.parametrize("sizes", [(10,), (10, 20), (24, 1 << 17), (1 << 17, 3, 1 << 17)])
def test_stream_sends_buffers_in_order(sizes):
    buffers = [bytes([k]) * size for k, size in enumerate(sizes)]
    ours, theirs = socket.socketpair()
    with ours, theirs, beside(theirs.makefile("rb").read) as received:
        Stream(ours).send(buffers)
        ours.close()
    assert received.result() == b"".join(buffers)


def test_stream_ignores_a_peer_that_is_gone():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        for _ in range(3):
            Stream(ours).send((b"x" * 100,))


def test_stream_is_torn_by_a_send_that_failed_and_not_while_another_thread_sends():
    large = bytes(1 << 22)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = Stream(ours)
        with beside(stream.send, [large]):
            assert theirs.recv(1, socket.MSG_PEEK)  # it sends, and cannot end
            with beside(stream.is_torn) as torn:
                theirs.recv(len(large), socket.MSG_WAITALL)
            assert torn.result() is False
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            stream.send([large])
        assert stream.is_torn()


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_integers_round_trip(values):
    assert memoryview(pack_ints(*values)).cast("q").tolist() == values


# -- tensors ---------------------------------------------------------------------------------------

# Those with a name in torch are sent; a bits or quantized dtype holds nothing that torch can make.
SENT = [dtype for dtype in wire.DTYPES if not str(dtype).startswith(("torch.q", "torch.bits"))]
SHAPES = [(), (1,), (3,), (0,), (2, 0, 3), (4, 3, 2), (1, 1, 1, 1, 5)]


def example(shape, dtype):
    """A tensor of any dtype, of random bytes (of 0 and 1 for bool: other bytes are no bools)."""
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.reshape(-1)
    if flat.numel():
        flat.view(torch.uint8).random_(0, 2 if dtype == torch.bool else 256)
    return tensor


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and _bytes(a) == _bytes(b)


def _bytes(tensor):
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def round_trip(tensor):
    with connection() as (end, reader), sending(end, *map(bytes, put_frame(5, 77, tensor))):
        frames = reader.frames()
        kind, seq, body = next(frames)
        assert (kind, seq) == (wire.PUT, 5)
        assert body[:24].cast("q").tolist() == [77, -1, 0]
        received = wire.read_tensor(body[24:])
        with pytest.raises(EOFError):
            next(frames)  # the length announced is the length sent
        return received


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((99, 1, 4), "a tensor of dtype 99 with 1 dims"),
        ((0, 5, 4), "a tensor of dtype 0 with 5 dims"),
        ((wire.DTYPES.index(torch.float32), 1, 3), r"float32\[3\] in 8 bytes"),
        ((wire.DTYPES.index(torch.float32), 1, -2), r"float32\[-2\] in 8 bytes"),
    ],
)
def test_a_tensor_that_is_none(given, why):
    with pytest.raises(FrameError, match=why):
        wire.read_tensor(memoryview(pack_ints(*given) + bytes(8)))


def through_shared_memory(tensor):
    if not tensor.numel():
        return tensor.clone()  # no bytes, which do not travel so
    with contextlib.closing(Pair()) as pair:
        return pair.send(tensor)[1]


WAYS = pytest.mark.parametrize("travel", [round_trip, through_shared_memory])


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@WAYS
@pytest.mark.parametrize("dtype", SENT, ids=str)
def test_tensor_round_trip(dtype, travel):
    torch.manual_seed(0)
    for shape in SHAPES:
        tensor = example(shape, dtype)
        assert same_bits(travel(tensor), tensor), shape


@pytest.mark.parametrize("shape", [(5000,), (1, 5000), (2, 50, 50)])
def test_the_elements_of_a_large_tensor_are_aligned(shape):
    """Else torch's code for complex128 ends the process."""
    tensor = example(shape, torch.complex128)
    received = round_trip(tensor)
    assert received.data_ptr() % 16 == 0
    assert same_bits(received, tensor)


def test_every_ordinary_dtype_is_sent():
    assert {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16),
        *(torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    } <= set(SENT)


VIEWS = {
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(10)[::3],
    "expanded": torch.tensor(3.0).expand(4, 2),
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "requires grad": torch.ones(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "offset": torch.arange(10.0)[4:],
    "large": torch.arange(1 << 20),
}


@WAYS
@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS.keys())
def test_view_arrives_as_its_values(tensor, travel):
    received = travel(tensor)
    assert torch.equal(received, tensor.detach().resolve_conj().resolve_neg())
    assert not received.requires_grad
    assert received.is_contiguous()


# --- several receivers ----------------------------------------------------------------------------


class Receivers:
    """Sockets to some readers; each reads as much as it is told."""

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.ours = [ours for ours, _ in pairs]
        self.theirs = [theirs for _, theirs in pairs]

    def __enter__(self) -> Receivers:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (*self.ours, *self.theirs):
            sock.close()

    def read(self, place: int) -> bytes:
        """Everything that is there now."""
        found = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := self.theirs[place].recv(1 << 20, socket.MSG_DONTWAIT):
                found += chunk
        return found


def test_an_outbox_without_room():
    """What does not fit is kept, and goes on where it stopped, to every receiver."""
    with Receivers(3) as receivers:
        outbox, found = Outbox(), [b"", b"", b""]
        large = [bytes([k]) * 1_000_000 for k in range(3)]
        outbox.post(receivers.ours, [b"head"] * 3, [large, [b"tail"] * 3])
        outbox.post(receivers.ours[1:], [b"next"] * 2)  # stands behind it
        assert set(outbox.blocked) == set(receivers.ours)
        while not outbox.finish():
            for place in (2, 0, 1):
                found[place] += receivers.read(place)
        found = [each + receivers.read(place) for place, each in enumerate(found)]
    whole = [b"head" + each + b"tail" for each in large]
    assert found == [whole[0], whole[1] + b"next", whole[2] + b"next"]


def test_an_outbox_never_waits_for_one_that_has_no_room():
    with Receivers(2) as receivers:
        outbox = Outbox()
        outbox.post(receivers.ours, [b"a" * 1_000_000, b"b" * 10])
        assert list(outbox.blocked) == receivers.ours[:1]
        assert not outbox.finish()
        assert receivers.read(1) == b"b" * 10  # although the other one has no room
        found = b""
        rounds = outbox.rounds
        while not outbox.finish():
            found += receivers.read(0)
        assert outbox.rounds == rounds + 1
        outbox.post(receivers.ours, [b"next"] * 2)
        assert found + receivers.read(0) == b"a" * 1_000_000 + b"next"
        assert receivers.read(1) == b"next"
        assert outbox.unsent is None


def test_an_outbox_whose_receiver_is_gone():
    with Receivers(3) as receivers:
        outbox = Outbox()
        receivers.theirs[0].close()
        receivers.ours[1].close()  # a worker that was replaced
        outbox.post(receivers.ours, [b"x" * 300_000, b"y", b"z"], [[b"1", b"2", b"3"]])
        assert outbox.unsent is None
        assert receivers.read(2) == b"z3"


def test_frames_are_given_when_they_are_complete():
    """However they are cut, also large ones that go to a place of their own."""
    place = memoryview(bytearray(700_000))

    def room(kind, seq, length, given):
        return place if seq == 3 else memoryview(bytearray(length))

    with connection(room=room) as (end, reader):
        found = []
        sent = [
            (wire.DRAINED, 1, b""),
            (wire.REPLY, 2, bytes(range(256)) * 300),
            (wire.REPLY, 3, bytes(range(250)) * 2800),
            (wire.READY, -4, b"x" * 100),
        ]
        stream = b"".join(frame(kind, seq, body) for kind, seq, body in sent)
        cuts = [0, 1, 23, 24, 25, 70_000, 80_000, 500_000, 777_000, len(stream)]
        for first, last in pairwise(cuts):
            piece = stream[first:last]
            while piece:
                piece = piece[end.send(piece[: 1 << 16]) :]
                arrived = reader.frames(socket.MSG_DONTWAIT)
                found += [(kind, seq, bytes(body)) for kind, seq, body in arrived]
        assert found == sent
        assert bytes(place) == sent[2][2]

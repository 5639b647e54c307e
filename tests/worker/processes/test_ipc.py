"""Between agent and engine: frames arrive unchanged however they are split; the ring of large values; the slot page."""

import asyncio
import random
import socket
import threading

import pytest
from multigpu_worker.processes.ipc import blobs as blobs_module
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.blobs import BlobMemory
from multigpu_worker.processes.ipc.channel import EngineChannel
from multigpu_worker.processes.ipc.slots import SlotPage, SlotState


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "RING_BYTES", 1 << 20)


@pytest.mark.parametrize("seed", range(5))
def test_frames_survive_any_cut(small_ring: None, seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = socket.socketpair()
    memory = BlobMemory.create()
    sent: list[tuple[frames.Message, list[bytes]]] = []
    for n in range(60):
        blobs: list[bytes] = []
        sizes = [0, 10, frames.BLOB_BYTES_MIN - 1, frames.BLOB_BYTES_MIN, 100_000, 700_000, 2 << 20]
        values = [frames.put(rng.randbytes(rng.choice(sizes)), blobs) for _ in range(rng.randrange(4))]
        sent.append(((n, "words", values, None, 1.5), blobs))

    def write_in_pieces() -> None:
        for message, blobs in sent:
            for buffer in frames.encode(message, blobs, memory.up):
                for at in range(0, 40, 3):
                    theirs.sendall(buffer[:40][at : at + 3])
                theirs.sendall(buffer[40:])
        theirs.close()

    thread = threading.Thread(target=write_in_pieces)
    thread.start()
    decoder = frames.Decoder(memory.up)
    got: list[tuple[frames.Message, list[bytes]]] = []
    with pytest.raises(EOFError):
        while True:
            got += decoder.feed(ours)
    thread.join()
    assert got == sent


@pytest.mark.parametrize("dead", [False, True])
async def test_frames_before_a_stray_write_are_applied(dead: bool) -> None:
    """`dead`: the agent reads after the engine has ended."""
    ours, theirs = socket.socketpair()
    memory = BlobMemory.create()
    large = b"x" * frames.BLOB_BYTES_MIN
    sent: list[tuple[frames.Message, list[bytes]]] = [(("done", 1), []), (("done", 2), [large]), (("done", 3), [])]
    got: list[tuple[frames.Message, list[bytes]]] = []
    errors: list[frames.FrameError] = []
    broken = asyncio.Event()

    def end(error: frames.FrameError) -> None:
        errors.append(error)
        broken.set()

    with theirs:
        channel = EngineChannel(ours, memory, lambda *frame: got.append(frame), end)
        data = b"".join(buffer for frame in sent for buffer in frames.encode(*frame, memory.up))
        theirs.sendall(data + b"a line printed to the wrong descriptor\n")
        if dead:
            channel.read_rest()
        else:
            await asyncio.wait_for(broken.wait(), 5)  # the engine sends nothing more
        assert got == sent
        assert len(errors) == (not dead)
        channel.close()


def test_ring_uses_its_room_and_no_more_and_keeps_random_values(small_ring: None) -> None:
    ring = BlobMemory.create().up
    whole = b"a" * (1 << 20)
    place = ring.write(whole)
    assert place is not None
    assert ring.write(b"b") is None
    assert ring.read(place, len(whole)) == whole
    for n in range(50):  # an empty ring is written from its beginning, and all of it can be used
        place = ring.write(whole[: (1 << 20) - n])
        assert place is not None
        assert place % (1 << 20) == 0
        ring.read(place, (1 << 20) - n)
    assert ring.write(whole + b"b") is None
    for _ in range(3):  # small values reuse the same memory, which is warm
        place = ring.write(b"small")
        assert place is not None
        assert place % (1 << 20) == 0
        ring.read(place, 5)
    rng = random.Random(2)
    ring = BlobMemory.create().down
    waiting: list[tuple[int, bytes]] = []
    rejected = 0
    for _ in range(3000):
        if waiting and rng.random() < 0.5:
            place, data = waiting.pop(0)
            assert ring.read(place, len(data)) == data
        else:
            data = rng.randbytes(rng.randrange(1, 300_000))
            written = ring.write(data)
            if written is None:
                rejected += 1
                assert waiting, "an empty ring has room"
            else:
                waiting.append((written, data))
    assert rejected > 0


def test_slot_page_is_seen_through_another_mapping() -> None:
    ours = SlotPage.create(2)
    theirs = SlotPage(ours.fd, 2)
    for field, value in ((theirs.STARTED, 5), (theirs.BATCH, 6), (theirs.LEASE, 7), (theirs.BEATS, 8)):
        theirs.view[theirs.FIELDS + field] = value
    assert ours.sample() == [
        SlotState(batch_id=0, lease_id=0, started_ns=0, beats=0),
        SlotState(batch_id=6, lease_id=7, started_ns=5, beats=8),
    ]

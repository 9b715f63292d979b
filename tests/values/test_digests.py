"""Tests of `nbdist.values.digests`: equal bytes have equal digests, different bytes do not."""

from __future__ import annotations

import pytest

from nbdist.values.digests import PIECE_BYTES, digest_bytes, digest_pieces, sample_of

DATA = bytes(range(256)) * 4


@pytest.mark.parametrize("size", [1, 7, 255, len(DATA) - 1, len(DATA)])
def test_a_digest_of_pieces_does_not_depend_on_their_size(size: int) -> None:
    """The same bytes in pieces of any size have one digest, and a changed byte changes it."""
    pieces = [DATA[at : at + size] for at in range(0, len(DATA), size)]
    assert digest_pieces(pieces) == digest_pieces([DATA])
    for number, piece in enumerate(pieces):
        changed = [*pieces]
        changed[number] = piece[:-1] + bytes([piece[-1] ^ 1])
        assert digest_pieces(changed) != digest_pieces([DATA])


def test_each_piece_of_big_memory_is_digested() -> None:
    """A changed byte in any piece, and a byte more, change the digest of big memory."""
    data = bytearray(2 * PIECE_BYTES + 1)
    before = digest_bytes(data)
    assert digest_bytes(bytes(data)) == before
    for at in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES - 1, 2 * PIECE_BYTES):
        data[at] = 1
        assert digest_bytes(data) != before
        data[at] = 0
    assert digest_bytes(bytes(len(data) + 1)) != before


def test_a_sample_shows_another_size_or_page() -> None:
    """A sample of big memory differs with the size and the first byte, and not for equal bytes."""
    data = bytearray(PIECE_BYTES)
    before = sample_of(data)
    assert sample_of(bytes(data)) == before
    assert sample_of(bytes(len(data) - 1)) != before
    data[0] = 1
    assert sample_of(data) != before

"""Payloads of tasks and results: pickles with out-of-band buffers.

Large objects with the buffer protocol, such as numpy arrays, are not copied into the pickle. A
payload with buffers is: :data:`MAGIC`, number of buffers (4 bytes), length of the pickle and of
each buffer (8 bytes each, little endian), the pickle, and the buffers at multiples of
:data:`ALIGNMENT`. A payload without buffers is a plain pickle.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

PICKLE_PROTOCOL = 5
MAGIC = b"SwP5"
FAILURE_MAGIC = b"SwFl"
ALIGNMENT = 16
"""Bytes. The memory of a received payload begins at such a multiple, and so do its buffers."""
FAILURE_TEXT_MAX = 16 << 10
"""Characters of a traceback that reach the driver; longer ones lose their beginning."""

_HEAD = struct.Struct("<4sI")
_FAILURE_HEAD = struct.Struct("<4sQ")


def dump(value: object) -> bytes:
    """Returns the payload with a value. Buffers are copied once, into the payload."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, PICKLE_PROTOCOL, buffer_callback=buffers.append)
    if not buffers:
        return data
    views = [buffer.raw() for buffer in buffers]
    lengths = (len(data), *(view.nbytes for view in views))
    head = _HEAD.pack(MAGIC, len(views)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    parts: list[bytes | memoryview] = [head, data]
    position = len(head) + len(data)
    for view in views:
        padding = -position % ALIGNMENT
        parts += (bytes(padding), view)
        position += padding + view.nbytes
    return b"".join(parts)


def load(payload: bytes | memoryview) -> Any:
    """Returns the value in a payload. Buffers of the value are read-only views of the payload."""
    if payload[:4] != MAGIC:
        return pickle.loads(payload)
    view = memoryview(payload)
    _, count = _HEAD.unpack_from(view)
    length, *sizes = struct.unpack_from(f"<{count + 1}Q", view, _HEAD.size)
    begin = _HEAD.size + 8 * (count + 1)
    position = begin + length
    buffers = []
    for size in sizes:
        position += -position % ALIGNMENT
        buffers.append(view[position : position + size])
        position += size
    return pickle.loads(view[begin : begin + length], buffers=buffers)


def dump_failure(attempt: int, text: str) -> bytes:
    """Returns the partial result that tells why an attempt fails."""
    return _FAILURE_HEAD.pack(FAILURE_MAGIC, attempt) + text[-FAILURE_TEXT_MAX:].encode()


def load_failure(data: bytes | memoryview) -> tuple[int, str] | None:
    """Returns the attempt and the text in such a partial result, and None for other ones."""
    if data[:4] != FAILURE_MAGIC:
        return None
    _, attempt = _FAILURE_HEAD.unpack_from(data)
    return attempt, bytes(data[_FAILURE_HEAD.size :]).decode(errors="replace")

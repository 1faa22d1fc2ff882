"""Sends every kind of content to itself and to a task in another process, and checks what arrives.

Usage: py_content.py [numpy]
"""

import array
import struct
import sys

import sempa_pvm as pvm

TAG = 7
LARGE = 5_000_000


def raises(error_class, function, *args, **kwargs):
    """Returns the exception that a call raises, which must be of this class."""
    try:
        value = function(*args, **kwargs)
    except error_class as error:
        return error
    raise AssertionError(f"no {error_class.__name__}, but {value!r}")


def echo(vm):
    """Sends every message back in the form in which it came, until an empty message comes."""
    while True:
        message = vm.recv(vm.parent)
        if not len(message):
            return
        vm.parent.send(message.tag, message.data)


def round_trip(vm, peer, send):
    send(peer)
    message = vm.recv(peer, TAG, timeout=60)
    assert message.sender == peer and message.tag == TAG, message
    return message


def check_bytes(vm, peer):
    for data in [b"x", bytearray(b"abc"), memoryview(b"0123456789")[::2], b"z" * LARGE]:
        message = round_trip(vm, peer, lambda task: task.send(TAG, data))
        assert bytes(message) == bytes(data) and len(message) == len(bytes(data))
        assert message.data.readonly and message.data.format == "B"
    raises(TypeError, peer.send, TAG, "text")
    raises(TypeError, peer.send, TAG, 17)
    raises(ValueError, peer.send, -1, b"x")
    raises(TypeError, memoryview(message.data).__setitem__, 0, 1)


def check_arrays(vm, peer):
    numbers = array.array("d", range(100_000))
    message = round_trip(vm, peer, lambda task: task.send_array(TAG, numbers))
    view = message.array()
    assert (view.format, view.shape, view.readonly) == ("d", (100_000,), True)
    assert view[99_999] == 99_999.0
    matrix = memoryview(bytes(range(24))).cast("B", (2, 3, 4))
    view = round_trip(vm, peer, lambda task: task.send_array(TAG, matrix)).array()
    assert view.shape == (2, 3, 4) and view.tolist() == matrix.tolist()
    # The memory stays while a view refers to it, also after the message is gone.
    del message
    assert view[1, 2, 3] == 23
    twice = pvm.Content.array(array.array("i", [1, 2, 3]))
    for _ in range(2):
        assert round_trip(vm, peer, lambda t: t.send(TAG, twice)).array().tolist() == [1, 2, 3]


def check_numpy(vm, peer):
    import numpy

    matrix = numpy.arange(12, dtype=numpy.float64).reshape(3, 4)
    records = numpy.array([(1, 2.5), (3, 4.5)], dtype=[("n", "i4"), ("x", "f8")])
    arrays = [
        matrix,
        numpy.asfortranarray(matrix),
        matrix[::2, 1::2],
        matrix.astype(">f4"),
        matrix + 1j,
        numpy.zeros((0, 5), dtype=numpy.int16),
        records,
        numpy.random.default_rng(1).random((1000, 1000)),
    ]
    for sent in arrays:
        message = round_trip(vm, peer, lambda task: task.send_array(TAG, sent))
        got = numpy.asarray(message.array())
        assert got.dtype == sent.dtype and got.shape == sent.shape, (got.dtype, sent.dtype)
        assert numpy.array_equal(got, sent) and not got.flags.writeable
        assert not got.flags.owndata
    fortran = round_trip(vm, peer, lambda t: t.send_array(TAG, numpy.asfortranarray(matrix)))
    assert numpy.asarray(fortran.array()).flags.f_contiguous
    plain = round_trip(vm, peer, lambda task: task.send(TAG, matrix))
    assert numpy.array_equal(numpy.frombuffer(plain.data), matrix.ravel())
    packer = pvm.Packer().pack_array(matrix).pack_array(matrix.astype("i4")).pack_array(1j * matrix)
    vm.me.send(TAG, packer)
    items = vm.recv(vm.me).unpacker()
    assert items.unpack_double(12) == matrix.ravel().tolist()
    assert items.unpack_int(12) == list(range(12))
    assert numpy.array_equal(numpy.asarray(items.unpack_array("Zd", 12)), 1j * matrix.ravel())
    raises(ValueError, pvm.Packer().pack_array, matrix.astype(">f8"))


def check_objects(vm, peer):
    value = {"name": "x", "list": [1, 2.5, None], "bytes": b"y" * LARGE}
    message = round_trip(vm, peer, lambda task: task.send_object(TAG, value))
    assert message.object() == value
    vm.me.send(TAG, pvm.Content.object(value))
    assert vm.recv(vm.me).object() == value
    raises(Exception, peer.send_object, TAG, lambda: None)


def check_items(vm):
    for encoding in ("xdr", "raw"):
        packer = pvm.Packer(encoding)
        packer.pack_int(-2, 2**31 - 1).pack_uint(2**32 - 1).pack_long(-(2**63)).pack_ulong(2**64 - 1)
        packer.pack_short(-32768).pack_ushort(65535).pack_float(1.5).pack_double(-2.5, 1e300)
        packer.pack_complex_float(1 + 2j).pack_complex_double(-3j, 4).pack_bytes(b"abc")
        packer.pack_str("grüße").pack_str("\udcff").pack_array(array.array("h", [1, -1]))
        vm.me.send(TAG, packer)
        items = vm.recv(vm.me, TAG).unpacker()
        assert items.unpack_int(2) == [-2, 2**31 - 1]
        assert items.unpack_uint() == 2**32 - 1
        assert items.unpack_long() == -(2**63) and items.unpack_ulong() == 2**64 - 1
        assert items.unpack_short() == -32768 and items.unpack_ushort() == 65535
        assert items.unpack_float() == 1.5 and items.unpack_double(2) == [-2.5, 1e300]
        assert items.unpack_complex_float() == 1 + 2j
        assert items.unpack_complex_double(2) == [-3j, 4 + 0j]
        assert items.unpack_bytes(3) == b"abc"
        assert items.unpack_str() == "grüße" and items.unpack_str() == "\udcff"
        view = items.unpack_array("h", 2)
        assert view.format == "h" and view.tolist() == [1, -1]
        assert items.remaining == 0
        error = raises(pvm.EndOfMessageError, items.unpack_int)
        assert error.name == "PvmNoData" and str(error).startswith("the message from t"), error
    raises(OverflowError, pvm.Packer().pack_short, 40_000)
    raises(ValueError, pvm.Packer().pack_str, "a\0b")
    raises(ValueError, pvm.Packer, "json")
    vm.me.send(TAG, pvm.Packer().pack_int(2**31 - 1))
    raises(pvm.BadMessageError, vm.recv(tag=TAG).unpacker().unpack_str)
    vm.me.send(TAG, pvm.Packer().pack_int(1))
    items = vm.recv(tag=TAG).unpacker()
    raises(pvm.EndOfMessageError, items.unpack_int, 2**60)
    raises(pvm.EndOfMessageError, items.unpack_array, "d", 2**62)
    assert items.unpack_int() == 1


def check_damaged_contents(vm):
    """A message that is no array or object, or has a wrong header, raises an exception."""
    header = struct.Struct("<8sIBBHQ2Q1s")

    def array_message(shape, element_bytes=8, format=b"d", order=b"C", size=64, data=48):
        head = header.pack(
            b"SempaAr1", size, 2, order[0], len(format), element_bytes, *shape, format
        )
        return head.ljust(64, b"\0") + bytes(data)

    def receive(data):
        vm.me.send(TAG, data)
        return vm.recv(vm.me, TAG)

    assert receive(array_message((2, 3))).array().shape == (2, 3)
    damaged = [
        b"SempaAr1",
        array_message((2, 4)),
        array_message((2**32, 2**32)),
        array_message((2**63, 2)),
        array_message((0, 2**63), data=0),
        array_message((2, 3), element_bytes=0),
        array_message((2, 6), element_bytes=4),
        array_message((2, 3), order=b"X"),
        array_message((2, 3), size=2**31),
        array_message((2, 3), size=16),
        b"plain bytes",
    ]
    for data in damaged:
        error = raises(pvm.BadMessageError, receive(data).array)
        assert error.code == -12 and "contains no array" in str(error), error
    raises(pvm.BadMessageError, receive(pvm.Packer().pack_int(1)).array)
    raises(pvm.BadMessageError, receive(b"plain bytes").object)


def main(vm):
    if vm.parent is not None:
        return echo(vm)
    (peer,) = vm.spawn(*pvm.python(__file__))
    for task in (vm.me, peer):
        check_bytes(vm, task)
        check_arrays(vm, task)
        check_objects(vm, task)
        if "numpy" in sys.argv:
            check_numpy(vm, task)
    check_items(vm)
    check_damaged_contents(vm)
    peer.send(TAG)
    print("contents are right")
    return 0


if __name__ == "__main__":
    pvm.run(main)

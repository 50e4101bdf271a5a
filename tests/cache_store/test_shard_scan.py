"""Reading a shard file once, for its hash and its samples."""

import os
import threading
from io import FileIO

from cache_store.shard_scan import read_into


def test_a_piece_is_read_whole_though_the_system_gives_it_in_parts():
    """A pipe gives what it holds, as some file systems do."""
    data, (reading, writing) = os.urandom(300_000), os.pipe()
    with FileIO(reading) as stream, FileIO(writing, "w") as sink:
        writer = threading.Thread(target=write_and_close, args=(sink, data))
        writer.start()
        first, rest = bytearray(200_000), bytearray(200_000)
        assert read_into(stream, memoryview(first)) == 200_000
        assert read_into(stream, memoryview(rest)) == 100_000, "all that is left"
        writer.join()
    assert first + rest[:100_000] == data


def write_and_close(sink: FileIO, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += sink.write(data[written:])
    sink.close()

"""Limits on the cost of a request, enforced before it is read, unpacked, parsed or decoded."""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import json
import struct
import subprocess
import sys
import threading
import tracemalloc
import weakref
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.requests import Request

from gati.errors import GatiError, OverloadError, RequestError, TooLargeError
from services.collecting import uncollected
from services.config import ServeConfig
from services.pool import BoundedPool
from services.scheduler.bodies import read_body
from services.scheduler.budget import ByteBudget, check_json
from services.scheduler.images import decode_image, read_image
from services.scheduler.nested import array_of
from services.scheduler.parameters import positive, priority
from services.scheduler.protocol import parse_request, split
from services.wire.codec import Limits, Service, encode_parts
from services.wire.gen import Inference
from services.wire.gen.ttypes import InferRequest, Tensor
from services.wire.tensors import check_texts, elements, from_bytes
from tests.waiting import in_the_end

MIB = 2**20


def tensor(**changes: Any) -> bytes:
    entry = {"name": "input", "shape": [1], "datatype": "UINT8", "data": [1]} | changes
    return orjson.dumps({"inputs": [entry]})


@pytest.mark.parametrize("shapes", [([], []), ([], [1, 8]), ([1, 8], [])])
@pytest.mark.parametrize("shorter", [False, True])
def test_a_single_number_is_no_input_of_several(shapes: tuple[list[int], ...], shorter: bool) -> None:
    names = ("ids", "mask")
    arrays = [SimpleNamespace(name=name, datatype="INT64", shape=[8], shorter=shorter) for name in names]
    inputs = [
        {"name": name, "datatype": "INT64", "shape": shape, "data": [1] * elements(shape)}
        for name, shape in zip(names, shapes, strict=True)
    ]
    with pytest.raises(RequestError, match=r"` has shape \[\]; give \[batch, 8\], one row for each input"):
        parse_request(orjson.dumps({"inputs": inputs}), b"", arrays)


def test_a_model_with_several_inputs_is_not_said_to_take_one() -> None:
    arrays = [SimpleNamespace(name=name) for name in ("ids", "mask")]
    with pytest.raises(RequestError, match="`inputs` must be a list with one to 2 tensors"):
        parse_request(orjson.dumps({"inputs": [{"name": "ids"}] * 3}), b"", arrays)


@pytest.mark.parametrize("count", [9, 400, 200_000])
def test_a_shape_has_few_dimensions_and_costs_nothing(count: int) -> None:
    """One of 200,000 sizes took an hour to multiply."""
    for shape in ([3] * count, [2**39] * count, [0] * count):
        with pytest.raises(RequestError, match="up to 8 sizes"):
            parse_request(tensor(shape=shape))
        with pytest.raises(RequestError, match="up to 8 sizes"):
            from_bytes("UINT8", shape, b"")
    with pytest.raises(RequestError, match="up to 8 sizes"):
        elements([2**60])
    assert elements([2**39] * 8) == 2 ** (39 * 8)


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


def deepest(count: int, depth: int) -> Any:
    found: Any = [1] * count
    for _ in range(depth):
        found = [found]
    return found


DEEP = "deep"  # stands for a value so deep that what writes JSON refuses it


def deep(document: bytes, depth: int) -> bytes:
    return document.replace(b'"deep"', b"[" * depth + b"]" * depth)


@pytest.mark.parametrize("name", ["name", "datatype", "shape", "data"])
@pytest.mark.parametrize("depth", [2, 400, 1000])
def test_deep_values_are_refused_in_one_line(name: str, depth: int) -> None:
    with pytest.raises(RequestError) as refused:
        parse_request(deep(tensor(**{name: DEEP}), depth))
    assert len(str(refused.value)) < 300


def test_numbers_of_many_digits_are_refused() -> None:
    for digits in (39, 41, 5000):
        with pytest.raises(RequestError, match="`priority` is 9999"):
            priority("9" * digits)
    with pytest.raises(RequestError, match="`latency_slo_ms` is '1111"):
        positive({"latency_slo_ms": "1" * 5000}, "latency_slo_ms")
    with pytest.raises(RequestError, match="`latency_slo_ms` is 'a list'"):
        positive({"latency_slo_ms": nested(1000)}, "latency_slo_ms")
    with pytest.raises(RequestError, match="`priority` is an object"):
        priority({})


@pytest.mark.parametrize(
    ("parameters", "timeout_ms"),
    [
        ({"timeout": 10_000_000}, 10_000.0),
        ({"timeout": 10**12}, 3_600_000.0),
        ({"timeout_ms": 10_000}, 10_000.0),
        ({"timeout_ms": 10**9}, 3_600_000.0),
        ({"timeout": 2000, "timeout_ms": 5}, 2.0),
    ],
)
def test_a_timeout_is_in_microseconds_as_in_triton_or_in_milliseconds(
    parameters: dict[str, int], timeout_ms: float
) -> None:
    body = orjson.loads(tensor()) | {"parameters": parameters}
    asked = parse_request(orjson.dumps(body))
    assert asked.timeout_ms == pytest.approx(timeout_ms)


@pytest.mark.parametrize("outputs", [[{"name": DEEP}], [[DEEP]], [{"name": "exit"}] * 1000, [{"name": {}}]])
def test_outputs_are_few_and_plain(outputs: Any) -> None:
    document = orjson.loads(tensor()) | {"outputs": outputs}
    with pytest.raises(RequestError, match="no output is called|`outputs` has 1000 entries"):
        parse_request(deep(orjson.dumps(document), 1000))


MEMORY = st.recursive(
    st.none()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def held(value: Any) -> int:
    """What a parsed document takes of the memory, without what Python shares."""
    own = sys.getsizeof(value)
    if isinstance(value, list):
        return own + sum(map(held, value))
    if isinstance(value, dict):
        return own + sum(held(key) + held(each) for key, each in value.items())
    return own


@settings(max_examples=25, deadline=None)
@given(st.lists(MEMORY, max_size=20), st.booleans())
def test_the_estimate_of_a_document_is_an_upper_bound(document: list[Any], plain: bool) -> None:
    text = orjson.dumps(document) if plain else json.dumps(document).encode()
    assert check_json(text, 2**40) >= held(orjson.loads(text))


def test_documents_that_would_fill_the_memory_are_refused_unparsed() -> None:
    largest = 128 * MIB
    lists, numbers = b"[" + b"[]," * 1_300_000 + b"[]]", b'{"a":[' + b"1.5," * 3_000_000 + b"1]}"
    for text in (lists, numbers, b"{" * 400_000):
        with pytest.raises(TooLargeError, match="send tensors in binary"):
            check_json(text, largest)
    assert check_json(b'"' + b"x" * MIB + b'"', largest) < 1.01 * MIB
    assert check_json('"é"'.encode() + b"x" * MIB, largest) > 4 * MIB
    for letters in (2**18 - 1, 2**18, 2**18 + 1):  # wherever it is noticed that letters are wide
        assert check_json(b"x" * letters + b"\\u00e9", largest) >= 4 * letters
        assert check_json(b"x" * letters + b"\\n", largest) < 1.01 * letters
    sixteen_pictures = orjson.dumps(np.zeros(16 * 224 * 224 * 3, np.uint8).tolist())
    assert check_json(sixteen_pictures, largest)


def body_of(*chunks: bytes, **headers: str) -> Request:
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return messages.pop(0)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw, "method": "POST"}, receive)


def held_bytes(budget: ByteBudget) -> int:
    return budget._held_bytes


def read(request: Request, budget: ByteBudget, largest: int = 64 * MIB) -> bytes:
    read = []

    async def main() -> None:  # asyncio makes a text of what a task returns
        pool = BoundedPool("test", threads=1)
        try:
            with budget.open() as charge:
                read.append(await read_body(request, largest, charge, pool))
                assert held_bytes(budget) >= len(read[0])
        finally:
            pool.close()

    asyncio.run(main())
    return read[0]


def test_bodies_under_way_share_a_budget() -> None:
    budget = ByteBudget(3 * MIB)
    assert read(body_of(b"x" * MIB), budget) == b"x" * MIB and held_bytes(budget) == 0
    assert read(body_of(b"x", b"yz"), budget) == b"xyz"
    with budget.open() as other:
        other.add(2 * MIB)
        assert read(body_of(b"x" * MIB), budget) == b"x" * MIB
        with pytest.raises(OverloadError, match="requests in progress hold") as refused:
            read(body_of(b"x" * MIB, b"y"), budget)
        assert refused.value.retry_after_s is not None and held_bytes(budget) == 2 * MIB
    assert held_bytes(budget) == 0


def test_the_requests_of_one_model_leave_memory_to_others() -> None:
    budget = ByteBudget(100 * MIB, shared=True)
    with ExitStack() as held:

        def take(owner: str, count: int) -> bool:
            charge = held.enter_context(budget.open(owner))
            try:
                charge.add(count)
            except OverloadError:
                return False
            return True

        assert sum(take("flood", 4 * MIB) for _ in range(100)) == 20  # four times what they leave
        assert sum(take("other", 4 * MIB) for _ in range(100)) == 4
        assert take("third", 4 * MIB)
    assert held_bytes(budget) == 0
    for owner in ("flood", "other"):
        with budget.open(owner) as charge:
            charge.add(100 * MIB)  # one request may have all


def test_packed_bodies_are_charged_as_they_grow() -> None:
    bomb = gzip.compress(b"\0" * (8 * MIB))
    assert len(bomb) < 10_000
    with pytest.raises(OverloadError):
        read(body_of(bomb, content_encoding="gzip"), ByteBudget(4 * MIB))
    with pytest.raises(TooLargeError):
        read(body_of(bomb, content_encoding="gzip"), ByteBudget(64 * MIB), largest=MIB)
    data = np.random.default_rng(0).bytes(MIB)
    for packed, encoding in ((gzip.compress(data), "gzip"), (zlib.compress(data), "deflate")):
        assert read(body_of(packed, content_encoding=encoding), ByteBudget(8 * MIB)) == data
        with pytest.raises(RequestError, match="compressed body is incomplete"):
            read(body_of(packed[:-5], content_encoding=encoding), ByteBudget(8 * MIB))
        for more in (packed, b"\0", b"x" * MIB):  # it was dropped, and half a text was answered
            with pytest.raises(RequestError, match="data follow the compressed body"):
                read(body_of(packed + more, content_encoding=encoding), ByteBudget(8 * MIB))
    with pytest.raises(RequestError, match="does not match its Content-Encoding"):
        read(body_of(b"xxxx", content_encoding="gzip"), ByteBudget(8 * MIB))


def png(width: int, height: int) -> bytes:
    return saved("PNG", width, height)


def saved(kind: str, width: int = 9, height: int = 6, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("L", (width, height)).save(out, kind, **options)
    return out.getvalue()


SCAN = b"\xff\xda\0\x08\x01\x01\0\x01\x3f\0"  # of a progressive JPEG, without data


def test_a_large_body_is_in_the_memory_once() -> None:
    """Joined, unpacked and on its way to a service it was there five times."""
    size = 16 * MIB
    chunks = [b"x" * 65_536] * (size // 65_536)
    tensor = {
        "name": "input",
        "shape": [1, size],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": size},
    }
    text = orjson.dumps({"inputs": [tensor]})
    packed = gzip.compress(b"x" * size)

    def peak(act: Any) -> float:
        tracemalloc.start()
        act()
        _, found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found / size

    def send() -> None:
        body = read(body_of(text, *chunks), ByteBudget(64 * MIB))
        asked = parse_request(*split(body, str(len(text))))
        arguments = Service(Inference).arguments["infer"](InferRequest("a", asked.tensor, 1, "t"))
        assert sum(map(len, encode_parts("infer", 1, 1, arguments, Limits()))) > size

    assert peak(send) < 1.3
    assert peak(lambda: read(body_of(packed, content_encoding="gzip"), ByteBudget(64 * MIB))) < 1.3


def test_text_is_in_the_memory_one_at_a_time() -> None:
    """One letter that is not ASCII made four bytes of each: 64 MiB became 256."""
    each = b"x" * 200_000 + "🜂".encode()
    packed = (struct.pack("<I", len(each)) + each) * 20
    tracemalloc.start()
    check_texts(Tensor("BYTES", [20], packed))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(packed) / 2
    for shape, data, why in (
        ([2**17], bytes(2**19), "texts; send at most"),
        ([1], struct.pack("<I", 2**19) + bytes(2**19), "send at most 262144"),
        ([2], struct.pack("<I", 1) + b"a", "does not fit"),
    ):
        with pytest.raises(RequestError, match=why):
            check_texts(Tensor("BYTES", shape, data))


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([(70_000,), (2, 40_000), (40_000, 2), (1, 1, 33_000), (3, 150, 150, 1), (0,), (5, 0)]),
    st.sampled_from(["u1", "<f4", "<i8"]),
    st.integers(0, 2**32 - 1),
)
def test_numbers_are_read_in_parts_as_in_one(shape: tuple[int, ...], kind: str, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 256, shape)
    found = array_of(numbers.tolist(), np.dtype(kind))
    assert found.dtype == kind and found.shape == shape and (found == numbers).all()


@pytest.mark.parametrize(
    "data",
    [
        [1] * 40_000 + [256],
        [1] * 40_000 + [0.5],
        [1] * 40_000 + ["1"],
        [1] * 40_000 + [[1]],
        [[1]] * 40_000 + [[1, 2]],
        [[1] * 40_000, [1] * 39_999],
        [[1] * 40_000, 1],
        [[1], [1] * 40_000],
        deepest(40_000, 200),
    ],
    ids=range(9),
)
def test_what_does_not_fit_in_a_later_part_is_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        array_of(data, np.dtype("u1"))


def test_a_batch_is_refused_before_anything_is_made_of_it() -> None:
    with pytest.raises(RequestError, match="a batch of 65 inputs; send 1 to 64"):
        parse_request(tensor(shape=[65, 1], data="what it is does not matter"), largest_batch=64)
    assert parse_request(tensor(shape=[1]), largest_batch=1).tensor.shape == [1]


def test_documents_are_counted_no_further_than_the_limit() -> None:
    document = b"[" + b"1," * 2_000_000 + b"1]"
    cost = check_json(document, 2**40)
    assert check_json(document, cost) == cost
    for pieces in (1, 7, 2**18 - 1, 2**18, 2**18 + 1):
        text = b"[" * pieces
        assert check_json(text, 2**40) == pieces + 48 + pieces * 104
    with pytest.raises(TooLargeError):
        check_json(document, cost - 1)
    assert check_json(document, cost + 1, held_bytes=1) == cost + 1
    with pytest.raises(TooLargeError):
        check_json(document, cost, held_bytes=1)


def test_garbage_is_collected_now_and_then_while_bodies_are_read_without_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    monkeypatch.setattr("services.collecting._LONGEST_S", 0.0)
    with uncollected():
        with uncollected():
            left = weakref.ref(Cycle())
            assert left() is not None
        assert left() is None and not gc.isenabled()
    assert gc.isenabled()


def test_pictures_are_charged_before_they_are_decoded() -> None:
    """A file of a few kilobytes may hold a gigabyte of pixels; what is decoded fits into a frame."""
    data = png(2000, 2000)
    assert len(data) < 10_000
    with ByteBudget(10 * MIB).open() as charge, pytest.raises(OverloadError):
        decode_image(data, 3, 10**7, charge)
    with ByteBudget(64 * MIB).open() as charge:
        assert decode_image(data, 3, 10**7, charge).shape == [1, 2000, 2000, 3]
    assert 4 * ServeConfig().largest_image_pixels < 64 * MIB


def test_pictures_of_very_many_scans_are_refused() -> None:
    """Each costs ten bytes, and as much time as all pixels: a large one kept a reader for hours."""
    data = saved("JPEG", progressive=True)
    with ByteBudget(64 * MIB).open() as charge:
        assert data.count(SCAN[:2]) > 4 and decode_image(data, 1, MIB, charge).shape == [1, 6, 9, 1]
        with pytest.raises(RequestError, match="more than 100 scans; save it again"):
            decode_image(data[:-2] + 100 * SCAN + data[-2:], 1, MIB, charge)
        with pytest.raises(
            RequestError, match="more than 100 scans"
        ):  # a part without content may not hide them
            decode_image(data[:-2] + b"\xff\x02\xff\xff" + 100 * SCAN + data[-2:], 1, MIB, charge)


def test_what_is_next_to_the_scans_of_a_picture_is_not_counted() -> None:
    """Phones append a short video: its ten megabytes have the two bytes of a scan often enough."""
    data, other = saved("JPEG"), 101 * SCAN
    part = b"\xff\xe5" + struct.pack(">H", len(other) + 2) + other
    with ByteBudget(64 * MIB).open() as charge:
        plain = decode_image(data, 1, MIB, charge)
        assert decode_image(data[:2] + part + data[2:] + other, 1, MIB, charge) == plain


@pytest.mark.slow
def test_what_a_picture_says_about_itself_is_not_logged(repository: Path) -> None:
    """One of 16 KiB wrote two and a half thousand warnings of Pillow to the log of the server."""
    tags = b"".join(struct.pack("<HHLL", tag, 1, 9999, 8) for tag in range(1, 9))
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 8) + tags + bytes(4)
    jpeg = saved("JPEG")
    data = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[20:]
    code = (
        "import sys; from services.scheduler.images import decode_image as read; "
        "from services.scheduler.budget import ByteBudget\n"
        "with ByteBudget(2**20).open() as charge: print(read(sys.stdin.buffer.read(), 1, 99, charge).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd=repository)
    assert (done.stdout, done.stderr) == (b"[1, 6, 9, 1]\n", b"")


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK"])
def test_pictures_are_converted_strip_by_strip_as_in_one(mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (700, 500, 4), np.uint8)
    image = Image.fromarray(pixels).convert("RGB").convert(mode)
    out = io.BytesIO()
    image.save(out, "JPEG" if mode == "CMYK" else "PNG", compress_level=0)
    for channels, wanted in ((1, "L"), (3, "RGB"), (4, "RGBA")):
        with ByteBudget(64 * MIB).open() as charge:
            found = decode_image(out.getvalue(), channels, 10**6, charge)
        whole = np.asarray(Image.open(io.BytesIO(out.getvalue())).convert(wanted))
        assert found.shape == [1, 700, 500, channels] and bytes(found.data) == whole.tobytes()


def test_of_grey_pictures_of_16_bits_the_upper_byte_is_taken() -> None:
    wide = np.random.default_rng(0).integers(0, 65_536, (700, 500), np.uint16)
    out = io.BytesIO()
    Image.fromarray(wide).save(out, "PNG", compress_level=0)
    with ByteBudget(64 * MIB).open() as charge:
        found = decode_image(out.getvalue(), 3, 10**6, charge)
    assert bytes(found.data) == np.repeat((wide >> 8).astype(np.uint8)[..., None], 3, axis=2).tobytes()


def test_the_calls_of_one_model_leave_the_pool_to_others() -> None:
    """Whoever came later waited for all of a flood, or found no place."""

    async def main() -> None:
        pool = BoundedPool("test", threads=1, waiting=20, shared=True)
        go, done = threading.Event(), []

        async def read(owner: str) -> None:
            try:
                await pool.run(go.wait, owner=owner)
                done.append(owner)
            except OverloadError:
                done.append(f"{owner} refused")

        flood = [asyncio.create_task(read("flood")) for _ in range(100)]
        await asyncio.sleep(0)
        refused = list(done)
        flood[5].cancel()
        others = [asyncio.create_task(read("other")) for _ in range(2)]
        await asyncio.sleep(0)
        go.set()
        await asyncio.wait([*flood, *others])
        assert refused == ["flood refused"] * 83  # one is read, and four times as many wait as are free
        assert done[83:] == ["flood", "flood", "other", "flood", "other"] + ["flood"] * 13
        pool.close()

    asyncio.run(main())


def test_calls_that_were_cancelled_take_no_places_in_the_pool() -> None:
    """While a thread was busy, those whose deadline had passed counted as if they waited."""

    async def main() -> None:
        pool, go = BoundedPool("test", threads=1, waiting=20, shared=True), threading.Event()
        busy = asyncio.create_task(pool.run(go.wait, owner="flood"))
        await asyncio.sleep(0)
        for _ in range(100):
            late = asyncio.create_task(pool.run(go.wait, owner="flood"))
            await asyncio.sleep(0)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
        last = asyncio.create_task(pool.run(go.wait, owner="flood"))
        await asyncio.sleep(0)
        go.set()
        assert await last and await busy
        pool.close()

    asyncio.run(main())


def test_what_fails_after_its_call_was_cancelled_is_no_error_of_the_server() -> None:
    """Of a client that left while its file was decoded, asyncio logged an error if it was no image."""

    async def main() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        pool, begun, go = BoundedPool("test", threads=1, waiting=1), threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            go.wait()
            raise RequestError("no image")

        left = asyncio.create_task(pool.run(work))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        left.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await left
        del left
        gc.collect()
        assert told == []
        pool.close()

    asyncio.run(main())


def test_small_pictures_and_packed_bodies_wait_for_no_thread() -> None:
    """Next to a busy event loop a thread waits for the GIL: queries were answered half a minute late."""

    async def main() -> None:
        pool, held = BoundedPool("test", threads=1, waiting=0), threading.Event()
        busy = asyncio.create_task(pool.run(held.wait))
        await asyncio.sleep(0)  # from now on it refuses all
        try:
            with ByteBudget(64 * MIB).open() as charge:
                small, large = (
                    body_of(gzip.compress(b"x" * size), content_encoding="gzip") for size in (9, MIB)
                )
                assert await read_body(small, MIB, charge, pool) == b"x" * 9
                assert (await read_image(png(9, 6), 1, MIB, charge, pool)).shape == [1, 6, 9, 1]
                with pytest.raises(OverloadError):
                    await read_body(large, MIB, charge, pool)
                with pytest.raises(OverloadError):
                    await read_image(png(200, 200), 1, MIB, charge, pool)
                assert (await read_image(saved("JPEG"), 1, MIB, charge, pool)).shape == [1, 6, 9, 1]
                for costly in (
                    png(9, 6) + b"zTXt",
                    saved("JPEG", progressive=True),
                    saved("BMP"),
                    saved("PPM"),
                ):
                    with pytest.raises(OverloadError):
                        await read_image(costly, 1, MIB, charge, pool)
        finally:
            held.set()
            await busy
            pool.close()

    asyncio.run(main())


def test_the_pool_is_bounded_and_what_nobody_waits_for_is_not_begun() -> None:
    async def main() -> None:
        pool = BoundedPool("test", threads=1, waiting=1)
        go, begun = threading.Event(), []

        def work(name: str) -> str:
            begun.append(name)
            go.wait()
            return name

        first = asyncio.create_task(pool.run(work, "first"))
        await in_the_end(lambda: begun == ["first"])
        second = asyncio.create_task(pool.run(work, "second"))
        await asyncio.sleep(0)
        with pytest.raises(OverloadError):
            await pool.run(work, "third")
        second.cancel()
        await asyncio.wait([second])
        fourth = asyncio.create_task(pool.run(work, "fourth"))  # its place is free again
        await asyncio.sleep(0)
        for _ in range(2):  # its deadline passes, and its client goes
            first.cancel()
            await asyncio.sleep(0)
        assert not first.done()  # its memory is in use
        go.set()
        assert await fourth == "fourth" and begun == ["first", "fourth"]
        with pytest.raises(asyncio.CancelledError):
            await first
        pool.close()

    asyncio.run(main())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-5, 2**70), max_size=12), st.binary(max_size=16))
def test_shapes_are_refused_as_ours_or_fit(shape: list[int], data: bytes) -> None:
    try:
        assert from_bytes("UINT8", shape, data).size == len(data)
    except GatiError as error:
        assert len(str(error)) < 400


def test_what_was_read_for_a_refused_request_is_gone_without_a_garbage_collection() -> None:
    """A cycle of exception and futures kept it, and collecting a million lists held up the event loop."""

    class Document:
        """What the body was parsed to."""

    alive: list[weakref.ref[Document]] = []

    def parse() -> None:
        document = Document()
        alive.append(weakref.ref(document))
        raise RequestError(f"{type(document).__name__} is no tensor")

    async def refuse(pool: BoundedPool) -> None:
        with pytest.raises(RequestError, match="no tensor"):
            await pool.run(parse)

    async def main() -> None:
        pool = BoundedPool("test", threads=1)
        gc.collect()
        gc.disable()
        try:
            await refuse(pool)
            assert len(alive) == 1
            await in_the_end(lambda: alive[0]() is None)  # the thread lets go of it when it has its turn
        finally:
            gc.enable()
            pool.close()

    asyncio.run(main())

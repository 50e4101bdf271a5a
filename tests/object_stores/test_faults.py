"""Failing networks and servers: no wrong or half file is left or read, and a rerun completes."""

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.errors import CacheError
from cache_store.storage import objects as object_stores
from cache_store.storage import retry
from cache_store.storage.retry import ATTEMPTS
from cache_store.storage.store import open_store, with_listing
from tests.object_stores.server import OTHERS
from tests.precompute.conftest import timeless_files
from tests.slurm import free_port

EVERY = "GET|HEAD|PUT|POST"
FAILS = [(kind, EVERY, "/some/cache/", 1) for kind in ("500", "reset", "lost")]
FAILS += [(kind, EVERY, "/some/cache/", ATTEMPTS) for kind in ("503", "429")]
FAILS += [("409", "PUT", "/plan/000000.parquet", 1)]
FAILS += [("409", "PUT", "/commits/", 1), ("cut", "GET", "/some/cache/", 1), ("short", "GET", "/latents/", 1)]
FAILS += [("flip upload", "PUT", "/some/cache/", 1)]
"""Kind, method, path and number of failures; only conditional requests get 409."""

ELSEWHERE = [(scheme, "lost", EVERY, "/some/cache/", 1) for scheme in OTHERS]


def build(scene, url):
    return f"precompute build --config {scene}/short.yaml --cache {url}"


def assert_one_line(said, program, *parts):
    (line,) = [line for line in said.splitlines() if line.startswith(f"{program}: error: ")]
    assert all(part in line for part in parts), line


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("scheme", "kind", "method", "part", "times"),
    [
        pytest.param(*case, marks=[] if case[1] in ("503", "lost") else pytest.mark.slow)
        for case in [*(("s3", *each) for each in FAILS), *ELSEWHERE]
    ],
)
def test_what_fails_and_then_works_is_tried_again(scene, url, objects, run, proxy, kind, method, part, times):
    """The first request to each address fails, in a build and when its cache is read."""
    whole = timeless_files(scene / "before")
    building = proxy.fail(kind, method, part, each=True, times=times)
    said = run(build(scene, url))
    assert ("waiting, for up to" in said) == (times > 1)
    assert objects.timeless() == whole
    proxy.mend()
    reading = proxy.fail(kind, method, part, each=True, times=times)
    numbers = np.arange(4)
    np.testing.assert_array_equal(open_cache(url).read(numbers), open_cache(scene / "before").read(numbers))
    assert building.met or reading.met, "no request was made to fail"
    proxy.mend()
    run(f"cache-store verify {url} --level full")


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "part", ["/zarr.json", "/plan/000000.parquet", "/latents/16x16/c/1/", "/samples/", "/commits/", "/seal.json"]
)
@pytest.mark.parametrize("kind", ["503", "reset"])
def test_a_request_that_always_fails_ends_in_one_line(scene, url, objects, run, proxy, kind, part):
    whole = timeless_files(scene / "before")
    proxy.fail(kind, "PUT|POST", part, times=10**6)
    said = run(build(scene, url), code=1)
    assert_one_line(said, "precompute", url, "503" if kind == "503" else "")
    assert "waiting" in said
    assert all(whole[name] == data for name, data in objects.timeless().items())
    proxy.mend()
    run(build(scene, url))
    assert objects.timeless() == whole


@pytest.mark.usefixtures("impatient")
def test_reading_refuses_what_is_wrong_and_gives_up_in_time(scene, url, run, proxy):
    run(build(scene, url))
    numbers = np.arange(4)
    for kind, error in {"flip": CacheError, "cut": OSError, "short": OSError, "hang": OSError}.items():
        cache = open_cache(url)
        proxy.fail(kind, "GET", "/latents/16x16/c/", times=10**6)
        with pytest.raises(error, match="latents/16x16/c/"):
            cache.read(numbers)
        proxy.mend()
        np.testing.assert_array_equal(cache.read(numbers), open_cache(scene / "before").read(numbers))


def test_a_listing_that_breaks_off_goes_on_where_it_was(url, objects, proxy):
    names = [f"{number:04d}" for number in range(1_001)]
    for name in names:  # past the proxy: a busy machine may take its second
        objects.put(name, b"")
    proxy.fail("503", "GET", "list-type", first=2, times=ATTEMPTS)
    assert with_listing(open_store(url)).list() == names


NOBODY, NO_URL = "http://127.0.0.1:{port}", "localhost:{port}"
WRONG = [
    ("s3", "", "s3://no-such-bucket/cache", 1, "'no-such-bucket'"),
    ("s3", "AWS_ENDPOINT_URL", NOBODY, 1, "endpoint"),
    ("s3", "AWS_REGION AWS_ENDPOINT_URL", "", 2, "AWS_REGION"),
    ("s3", "AWS_ENDPOINT_URL", NO_URL, 2, "http://HOST:PORT"),
    ("s3", "AWS_ALLOW_HTTP", "false", 1, "AWS_ALLOW_HTTP"),
    ("gs", "", "gs://no-such-bucket/cache", 1, "GOOGLE_BASE_URL"),
    ("gs", "GOOGLE_BEARER_TOKEN", "old", 1, "GOOGLE_APPLICATION_CREDENTIALS"),
    ("gs", "GOOGLE_BASE_URL", NO_URL, 2, "GOOGLE_BASE_URL"),
    ("gs", "GOOGLE_SERVICE_ACCOUNT", "/none", 2, "/none"),
    ("az", "", "az://no-such/cache", 1, "'no-such'"),
    ("az", "", "az://No_Such/cache", 1, "'No_Such'"),
    ("az", "AZURE_STORAGE_ACCOUNT_KEY", "b2xk", 1, "AZURE_STORAGE_ACCOUNT_NAME"),
    ("az", "AZURE_STORAGE_ENDPOINT", NO_URL, 2, "AZURE_STORAGE_ENDPOINT"),
    ("s3", "", "az://container/cache", 2, "AZURE_STORAGE_ACCOUNT_NAME"),
]
"""Scheme, variables and their value, or without variables an address, exit code, and what is named."""


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("scheme", "variables", "value", "code", "named"), WRONG)
def test_a_wrong_address_is_one_line(scene, bucket, run, monkeypatch, variables, value, code, named):
    for name in variables.split():
        monkeypatch.setenv(name, value.format(port=free_port()))
    address = f"{bucket}/cache" if variables else value
    object_stores.make_client.cache_clear()
    retry.ANSWERED.clear()
    for line in (f"cache-store info {address}", f"cache-store verify {address}", build(scene, address)):
        assert_one_line(said := run(line, code=code), line.split()[0], named)
        assert "waiting" not in said

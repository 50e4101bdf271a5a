"""The servers and the proxy behave like S3 and networks; otherwise the other tests here prove nothing."""

import base64
import hashlib
import http.client

import pytest

from tests.object_stores.faults import REFUSALS
from tests.object_stores.server import OTHERS

obstore = pytest.importorskip("obstore", reason="needs obstore, of the extra object-stores")


@pytest.mark.parametrize("kind", ["ministack", "witness"])
def test_a_server_refuses_what_s3_refuses(request, kind):
    server = request.getfixturevalue(kind)
    keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    options = {"client_options": {"allow_http": True}, "endpoint": server.endpoint}
    bucket = server.new_bucket()
    store = obstore.store.S3Store(bucket, **keys, **options)
    old = obstore.put(store, "a/file", b"first", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "a/file", b"second", mode="create")
    obstore.put(store, "a/file", b"third", mode={"e_tag": old["e_tag"]})
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.put(store, "a/file", b"fourth", mode={"e_tag": old["e_tag"]})
    assert bytes(obstore.get_range(store, "a/file", start=1, end=3)) == b"hi"
    assert [each["path"] for each in obstore.list_with_delimiter(store, "a")["objects"]] == ["a/file"]
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"))
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    connection.request("PUT", f"/{bucket}/wrong", b"body", {"x-amz-checksum-sha256": wrong})
    status = connection.getresponse().status
    connection.close()
    assert status == (400 if kind == "ministack" else 200), "moto takes it"


@pytest.mark.parametrize("scheme", OTHERS)
def test_the_other_servers_refuse_what_gcs_and_azure_refuse(bucket):
    """Unlike S3, they report a deletion of nothing.

    `test_a_wrong_address_is_one_line` shows that they check credentials.
    """
    store = obstore.store.from_url(bucket, client_options={"allow_http": True})
    obstore.put(store, "a/file", b"first", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "a/file", b"second", mode="create")
    assert bytes(obstore.get(store, "a/file").bytes()) == b"first"
    obstore.delete(store, "a/file")
    with pytest.raises(FileNotFoundError):
        obstore.delete(store, "a/file")


BODY = b"0123456789"


def request(proxy, method, path, body=None, timeout_s=60.0):
    """Return status and body, or the name of the connection's error."""
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def test_the_proxy_makes_chosen_requests_fail(bucket, proxy):
    path = f"/{bucket.removeprefix('s3://')}/file"
    assert request(proxy, "PUT", path, BODY)[0] == 200
    flipped = BODY[:5] + bytes([BODY[5] ^ 1]) + BODY[6:]
    failures = {"reset": "ConnectionResetError", "lost": "ConnectionResetError", "hang": "TimeoutError"}
    failures |= {"cut": "IncompleteRead", "short": (200, BODY[:5]), "flip": (200, flipped)}
    for kind, failure in failures.items():
        proxy.fail(kind, "GET", "file", first=2)
        found = [request(proxy, "GET", path, None, s) for s in (60, 0.3 if kind == "hang" else 60, 60)]
        assert found == [(200, BODY), failure, (200, BODY)], kind
        proxy.mend()
    for kind in REFUSALS:
        proxy.fail(kind, "GET")
        assert request(proxy, "GET", path)[0] == int(kind)
        proxy.mend()
    proxy.fail("flip upload", "PUT")
    assert request(proxy, "PUT", path, BODY)[0] == 200
    assert request(proxy, "GET", path) == (200, flipped)
    proxy.fail("lost", "PUT")
    assert request(proxy, "PUT", path, b"done") == "ConnectionResetError"
    assert request(proxy, "GET", path) == (200, b"done")
    proxy.mend()
    request(proxy, "GET", path)
    assert proxy.requests == [("GET", path, 4)]

"""Turn errors of object stores into OSErrors that say in one line what to check."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from cache_store.errors import ConfigError, install
from cache_store.storage.protocol import missing_error
from cache_store.storage.retry import transient_error

MISSING_EXTRA = f"object stores need obstore, which is not installed; run {install('object-stores')}"

ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}

REGION = {
    "s3": "AWS_REGION (and AWS_ENDPOINT_URL)",
    "gs": "GOOGLE_BASE_URL (if set)",
    "az": "AZURE_STORAGE_ACCOUNT_NAME",
}

CODE = re.compile(r"<Code>(\w+)</Code>")
BUSY = re.compile(r"(?:status |\()code: (429|50[0234])\b")
STATUS = re.compile(r"(?:status |\()code: (\d{3}\b(?: [A-Z][A-Za-z -]*)?)")
"""Status of an answer; for a deletion, Azure's batch answer writes it as `(code: 403)`."""

TRANSIENT_CODES = {"BadDigest", "ConditionalRequestConflict", "OperationAborted", "RequestTimeout"}
"""S3's codes for requests that may succeed if repeated: damaged in transit, in conflict, or too slow."""

NO_ANSWER = "error sending request"
"""obstore's words for a request without any answer; any other error without a status means that an answer broke off."""

BUILDER = "builder error"
"""Its words for a request that it does not send."""

METADATA_SERVICES = ("//169.254.", "metadata.google.internal", "no credentials")


@contextmanager
def explain_store_errors(where: str) -> Iterator[None]:
    """Raise errors of obstore as OSErrors about `where`; ConfigError if obstore is not installed."""
    try:
        from obstore import exceptions  # from the package: another thread may still be importing it
    except ImportError:
        raise ConfigError(MISSING_EXTRA) from None
    try:
        yield
    except (FileNotFoundError, exceptions.BaseError) as error:
        raise as_os_error(error, where) from None


def as_os_error(error: Exception, where: str) -> OSError:
    """Return the problem and what to check as an OSError; a TransientError if a repeat may help."""
    explained, status, text = explain(error, where), status_text(error), str(error)
    if any(name in text for name in METADATA_SERVICES):
        return transient_error(explained)
    if error_code(error) in TRANSIENT_CODES or BUSY.search(text):
        return transient_error(explained, status, is_away=True)
    is_explained = type(error).__name__ != "GenericError"  # obstore's class for errors whose cause it does not know
    if isinstance(error, FileNotFoundError) or is_explained or STATUS.search(text) or BUILDER in text:
        return explained
    return transient_error(explained, is_away=NO_ANSWER in text)


def error_code(error: Exception) -> str | None:
    found = CODE.search(str(error))
    return found and found[1]


def status_text(error: Exception) -> str:
    status = STATUS.search(str(error))
    return " ".join(filter(None, (status and status[1].strip(), error_code(error))))


def explain(error: Exception, where: str) -> OSError:
    text, scheme, code = str(error), where.partition("://")[0], error_code(error)
    if any(name in text for name in METADATA_SERVICES):  # a metadata service itself may have none
        return PermissionError(errno.EACCES, f"no credentials were found: set {CREDENTIALS[scheme]}", where)
    if isinstance(error, FileNotFoundError) and code in (None, "NoSuchKey", "BlobNotFound"):
        return missing_error(where)
    bucket = where.partition("://")[2].partition("/")[0]
    if code in ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName"):
        return OSError(errno.ENXIO, f"there is no bucket {bucket!r}: check its name, {REGION[scheme]}", where)
    if code in ("ExpiredToken", "TokenRefreshRequired", "RequestExpired"):
        return PermissionError(errno.EACCES, f"the token has expired ({code}): renew {CREDENTIALS[scheme]}", where)
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or "redirect" in text:
        return OSError(errno.EIO, f"the bucket lies in another region: check {REGION[scheme]}", where)
    if BUILDER in text:
        return OSError(errno.EIO, f"an endpoint of plain HTTP is used only with {ALLOW_HTTP[scheme]}=true", where)
    status = status_text(error)
    if code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch") or status.startswith(("401", "403")):
        why = f"the store refuses these credentials ({status}): check {CREDENTIALS[scheme]} and the bucket's policy"
        return PermissionError(errno.EACCES, why, where)
    if status == "400 Bad Request":  # the answer to a HEAD has no code
        causes = f"an expired token, or a wrong region or bucket {bucket!r}"
        why = f"the store answers {status}: {causes}: check {CREDENTIALS[scheme]}, and {REGION[scheme]}"
        return PermissionError(errno.EACCES, why, where)
    if status.startswith("501"):
        advice = "build in a folder, and `cache-store copy` it there; such a copy is read and verified as any other"
        return OSError(errno.ENOTSUP, f"the store has no conditional writes (it answers {status}): {advice}", where)
    if STATUS.search(text):
        number = errno.ENODATA if status.startswith("416") else errno.EIO  # the range is beyond the end of the file
        again = ", also when asked again" if BUSY.search(text) or code in TRANSIENT_CODES else ""
        return OSError(number, f"the store answers {status}{again}: {first_line(error)}", where)
    return OSError(errno.EIO, f"no whole answer: check the network and the endpoint ({first_line(error)})", where)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()

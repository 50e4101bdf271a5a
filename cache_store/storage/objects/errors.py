"""What an object store refuses, as errors that say in one line what to check."""

import errno
import os
import re

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
"""Of a deletion at Azure it is `(code: 403)`, in an answer to several."""

PASSING = {"BadDigest", "ConditionalRequestConflict", "OperationAborted", "RequestTimeout"}
"""Codes of S3's for requests that may do well when they are made again: damaged on the way, in conflict, too slow."""

METADATA_SERVICES = ("//169.254.", "metadata.google.internal", "no credentials")


class CutShortError(Exception):
    """An answer is shorter than it has to be, though it looks whole."""


def missing(where: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)


def cut_short(where: str) -> OSError:
    return OSError(errno.ENODATA, "answers are cut short, also when asked again", where)


def is_busy(error: Exception) -> bool:
    """Whether the store says that it has too much to do."""
    return BUSY.search(str(error)) is not None and not any(name in str(error) for name in METADATA_SERVICES)


def has_status(error: Exception) -> bool:
    """Whether the store has answered."""
    return STATUS.search(str(error)) is not None


def was_retried(error: Exception) -> bool:
    """Whether obstore has asked again by itself, which it does not where an answer broke off."""
    return " retries, " in str(error)


def code_of(error: Exception) -> str | None:
    """What S3, GCS and Azure call the matter in the body of an answer."""
    found = CODE.search(str(error))
    return found and found[1]


def said_by(error: Exception) -> str:
    """Status and code of an answer, as `503 Service Unavailable SlowDown`."""
    status = STATUS.search(str(error))
    return " ".join(filter(None, (status and status[1].strip(), code_of(error))))


def refusal(error: Exception, where: str) -> OSError:
    """Say what a person can check."""
    text, scheme, code = str(error), where.partition("://")[0], code_of(error)
    if any(name in text for name in METADATA_SERVICES):  # which may answer that it has none
        return PermissionError(errno.EACCES, f"no credentials were found: set {CREDENTIALS[scheme]}", where)
    if isinstance(error, FileNotFoundError) and code in (None, "NoSuchKey", "BlobNotFound"):
        return missing(where)
    bucket = where.partition("://")[2].partition("/")[0]
    if code in ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName"):
        return OSError(errno.ENXIO, f"there is no bucket {bucket!r}: check its name, {REGION[scheme]}", where)
    if code in ("ExpiredToken", "TokenRefreshRequired", "RequestExpired"):
        return PermissionError(errno.EACCES, f"the token has expired ({code}): renew {CREDENTIALS[scheme]}", where)
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or "redirect" in text:
        return OSError(errno.EIO, f"the bucket lies in another region: check {REGION[scheme]}", where)
    if "builder error" in text:
        return OSError(errno.EIO, f"an endpoint of plain HTTP is spoken to only with {ALLOW_HTTP[scheme]}=true", where)
    said = said_by(error)
    if code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch") or said.startswith(("401", "403")):
        why = f"the store refuses these credentials ({said}): check {CREDENTIALS[scheme]} and the bucket's policy"
        return PermissionError(errno.EACCES, why, where)
    if said == "400 Bad Request":  # to a HEAD, whose answer has no code
        what = f"an expired token, or a wrong region or bucket {bucket!r}"
        why = f"the store answers {said}: {what}: check {CREDENTIALS[scheme]}, and {REGION[scheme]}"
        return PermissionError(errno.EACCES, why, where)
    if STATUS.search(text):
        number = errno.ENODATA if said.startswith("416") else errno.EIO  # what was asked for lies behind the file's end
        return OSError(number, f"the store answers {said}, also when asked again: {first_line(error)}", where)
    return OSError(errno.EIO, f"no whole answer: check the network and the endpoint ({first_line(error)})", where)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()

"""What the tests call GCS: the headers of its XML API before a server of S3's protocol.

No server of GCS's XML API that holds what a cache needs (listings, uploads in parts) can be installed here. That API is
S3's by design, and this translates where the two part: whether a name may be taken, who asks, and what a deletion of
nothing is answered. It cannot show what GCS itself would refuse.
"""

from tests.object_stores.faults import Answer, Handler
from tests.object_stores.server import BEARER

REFUSED = b"<Error><Code>AuthenticationRequired</Code><Message>Authentication required.</Message></Error>"


class Google(Handler):
    """Asks a server of S3's protocol, which checks no credentials."""

    def ask(self, method: str, body: bytes) -> Answer:
        if self.headers["Authorization"] != f"Bearer {BEARER}":
            return 401, [("Content-Type", "application/xml")], REFUSED
        del self.headers["Authorization"]
        if self.headers["x-goog-if-generation-match"] == "0":
            self.headers["If-None-Match"] = "*"
        if method == "DELETE" and (found := super().ask("GET", b""))[0] == 404:
            return found
        return super().ask(method, body)

"""What is said of an image, as turns of a conversation."""

import msgspec

Conversation = list[dict[str, str]]


class Turn(msgspec.Struct):
    from_: str = msgspec.field(name="from")
    value: str


def captioned(caption: str) -> Conversation:
    """A caption as the answer to the image alone; no turns where it is blank."""
    if not (caption := caption.strip()):
        return []
    return [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": caption}]

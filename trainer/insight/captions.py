"""Lays out captions for people to read."""

import io
from collections.abc import Iterator

from PIL import Image

from cache_store.refusal import printable
from trainer.run.observers import Caption

PREVIEW_SIDE = 224
"""Least pixels of a preview's longest side in TensorBoard, which shows small pictures small."""

NOTHING = "(nothing)"
"""Shown in the place of an empty answer."""


def caption_lines(caption: Caption) -> Iterator[str]:
    reference = {} if caption.reference is None else {"reference": caption.reference}
    parts = {"answer": shown_answer(caption.text, is_whole=caption.is_whole)} | reference
    return answer_lines(f"row {caption.row}, {printable(caption.id)}", parts)


def caption_text(caption: Caption) -> str:
    return shown_answer(caption.text, is_whole=caption.is_whole)


def preview_png(caption: Caption) -> tuple[int, int, bytes] | None:
    """Height, width and PNG of the preview, every cell a square of pixels."""
    if caption.preview is None:
        return None
    image = Image.fromarray(caption.preview)
    scale = -(-PREVIEW_SIDE // max(image.size))
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return image.height, image.width, stream.getvalue()


def shown_answer(text: str, *, is_whole: bool) -> str:
    """Show an answer that may be empty, or cut short."""
    return (text + ("" if is_whole else " […]")) if text else NOTHING


def answer_lines(title: str, parts: dict[str, str]) -> Iterator[str]:
    """Lay out words under the name of their image, each part under its own name."""
    yield title
    for name, text in parts.items():
        for number, line in enumerate(text.splitlines() or [""]):
            yield f"  {'' if number else name:<9}  {printable(line)}".rstrip()

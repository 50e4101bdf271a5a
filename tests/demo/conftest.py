"""What the demo's small models learn from: its scenes, its tokenizer and its texts."""

from dataclasses import dataclass

import pytest
from transformers import PreTrainedTokenizerFast

from demo.dataset import Sample, samples
from demo.language_model import Caption, Lesson
from demo.tokenizer import make_tokenizer
from trainer.text.chat import ChatTokenizer


@dataclass(frozen=True)
class School:
    drawn: list[Sample]
    tokenizer: PreTrainedTokenizerFast
    lessons: list[Lesson]


@pytest.fixture(scope="session")
def school() -> School:
    drawn = list(samples(160, seed=0))
    tokenizer = make_tokenizer([sample.conversation for sample in drawn])
    chat = ChatTokenizer(tokenizer, str(tokenizer.chat_template), 128)
    texts = chat([sample.id for sample in drawn], [sample.conversation for sample in drawn])
    lessons = [Lesson(Caption.of(sample.scene), text) for sample, text in zip(drawn, texts, strict=True)]
    return School(drawn, tokenizer, lessons)

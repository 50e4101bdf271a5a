from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import ConfigError, ModelError, SourceError
from tests.trainer.conftest import GEMMA_TEMPLATE, make_tokenizer
from trainer.chat import ChatTokenizer, load_chat_tokenizer, to_messages

TWO_TURNS = [
    {"from": "human", "value": "<image>\nwhat is this"},
    {"from": "gpt", "value": "a red square"},
    {"from": "human", "value": "is it left"},
    {"from": "gpt", "value": "yes"},
]


def labelled(
    conversation: list[dict[str, str]], max_tokens: int = 64, template: str = GEMMA_TEMPLATE
) -> tuple[list[str], list[str]]:
    tokenizer = make_tokenizer(template)
    (text,) = ChatTokenizer(tokenizer, template, max_tokens)(["sample"], [conversation])
    words = tokenizer.convert_ids_to_tokens(text.tokens.tolist())
    return words, [word for word, is_label in zip(words, text.is_label, strict=True) if is_label]


def test_labels_are_exactly_the_assistants_tokens_and_its_end_of_turn() -> None:
    words, labels = labelled(TWO_TURNS)
    assert labels == ["a", "red", "square", "<end_of_turn>", "yes", "<end_of_turn>"]
    assert words[:4] == ["<bos>", "<start_of_turn>", "user", "\n"]
    assert words.count("<bos>") == 1


def test_a_template_without_bos_gets_one_all_the_same() -> None:
    without = GEMMA_TEMPLATE.replace("{{ bos_token }}", "")
    assert labelled(TWO_TURNS, template=without) == labelled(TWO_TURNS)


def test_nothing_after_the_last_label_is_kept() -> None:
    words, labels = labelled(TWO_TURNS[:3])
    assert words[-1] == "<end_of_turn>"
    assert labels == ["a", "red", "square", "<end_of_turn>"]


def test_a_text_cut_before_the_assistant_speaks_is_empty() -> None:
    words, labels = labelled(TWO_TURNS, max_tokens=14)
    assert (len(words), labels) == (14, ["a", "red"])
    assert labelled(TWO_TURNS, max_tokens=12) == ([], [])
    assert labelled(TWO_TURNS[:1]) == ([], [])
    assert labelled([]) == ([], [])


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("<image>\nwhat", "what"),
        ("what\n<image>", "what"),
        ("look at <image> now", "look at now"),
        ("<image>", ""),
        ("no marker", "no marker"),
    ],
)
def test_image_markers_vanish_wherever_they_stand(value: str, content: str) -> None:
    assert to_messages([{"from": "human", "value": value}]) == [{"role": "user", "content": content}]


def test_an_unknown_role_names_its_sample() -> None:
    with pytest.raises(SourceError, match=r"sample 'x7': unknown role 'robot'"):
        to_messages("x7", [{"from": "robot", "value": ""}])


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    last_only = "{% for m in messages %}{% if loop.last %}{{ m['role'] + m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"set model\.chat_template"):
        labelled(TWO_TURNS, template=last_only)


def test_a_conversation_that_the_template_refuses_names_its_sample() -> None:
    with pytest.raises(SourceError, match="sample 'sample': the chat template refuses it: no two in a row"):
        labelled(TWO_TURNS, template="{{ raise_exception('no two in a row') }}")


def test_the_digest_follows_all_that_decides_tokens_and_labels() -> None:
    tokenizer = make_tokenizer()
    digest = ChatTokenizer(tokenizer, GEMMA_TEMPLATE, 64).digest
    assert digest == ChatTokenizer(make_tokenizer(), GEMMA_TEMPLATE, 64).digest
    assert digest != ChatTokenizer(tokenizer, GEMMA_TEMPLATE, 65).digest
    assert digest != ChatTokenizer(tokenizer, GEMMA_TEMPLATE + " ", 64).digest
    tokenizer.add_tokens(["purple"])
    assert digest != ChatTokenizer(tokenizer, GEMMA_TEMPLATE, 64).digest


def save(tokenizer: Any, folder: Path) -> str:
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_without_template_needs_one_in_the_config(tmp_path: Path) -> None:
    folder = save(make_tokenizer(None), tmp_path / "model")
    with pytest.raises(ConfigError, match="no chat template"):
        load_chat_tokenizer(folder, None, 64)
    (tmp_path / "template.jinja").write_text(GEMMA_TEMPLATE)
    assert load_chat_tokenizer(folder, str(tmp_path / "template.jinja"), 64).template == GEMMA_TEMPLATE


def test_a_folder_without_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer can be loaded") as caught:
        load_chat_tokenizer(str(tmp_path), None, 64)
    assert "\n" not in str(caught.value)

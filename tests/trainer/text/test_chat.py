import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import ConfigError, ModelError
from tests.trainer.conftest import GEMMA_TEMPLATE, make_tokenizer
from trainer.text.chat import ChatTokenizer, load_chat_tokenizer, to_messages

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


@pytest.mark.parametrize(
    ("conversation", "max_tokens", "expected"),
    [
        (TWO_TURNS, 64, "a red square <end_of_turn> yes <end_of_turn>"),
        (TWO_TURNS[:3], 64, "a red square <end_of_turn>"),
        (TWO_TURNS, 14, "a red"),
        (TWO_TURNS, 12, ""),
        (TWO_TURNS[:1], 64, ""),
        ([], 64, ""),
    ],
)
def test_labels_are_what_the_assistant_says_and_end_the_text(conversation, max_tokens, expected):
    words, labels = labelled(conversation, max_tokens)
    assert labels == expected.split()
    assert words[-1:] == labels[-1:]
    assert len(words) <= max_tokens


def test_a_text_begins_with_one_bos_whatever_its_template():
    words, labels = labelled(TWO_TURNS)
    assert words[:4] == ["<bos>", "<start_of_turn>", "user", "\n"]
    assert words.count("<bos>") == 1
    assert labelled(TWO_TURNS, template=GEMMA_TEMPLATE.replace("{{ bos_token }}", "")) == (words, labels)


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
def test_image_markers_vanish_wherever_they_stand(value, content):
    assert to_messages([{"from": "human", "value": value}]) == [{"role": "user", "content": content}]


def test_an_answer_that_comes_first_is_one_to_the_image():
    words, labels = labelled([{"from": "gpt", "value": "<image>\na red square"}])
    assert words[:6] == ["<bos>", "<start_of_turn>", "user", "\n", "<end_of_turn>", "\n"]
    assert labels == ["a", "red", "square", "<end_of_turn>"]


@pytest.mark.parametrize("nothing", ["", " \n\t ", "<image>\n", "\u00a0"])
def test_an_answer_without_words_teaches_nothing(nothing):
    asked, answered = TWO_TURNS[:2], TWO_TURNS[2:]
    silent = [TWO_TURNS[0], {"from": "gpt", "value": nothing}]
    assert labelled(silent) == ([], [])
    assert labelled([{"from": "gpt", "value": nothing}]) == ([], [])
    words, labels = labelled([*silent, *answered])
    assert labels == ["yes", "<end_of_turn>"]
    assert words.count("<end_of_turn>") == 4
    assert labelled([*asked, *silent]) == labelled(asked)


def test_a_template_that_rewrites_earlier_turns_is_refused():
    last_only = "{% for m in messages %}{% if loop.last %}{{ m['role'] + m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"set model\.chat_template"):
        labelled(TWO_TURNS, template=last_only)


REFUSES = "the chat template refuses it: "


@pytest.mark.parametrize(
    ("template", "speaker", "problem"),
    [
        (GEMMA_TEMPLATE, "robot", "unknown role 'robot'; known are human,"),
        ("{{ raise_exception('no two in a row') }}", "gpt", f"{REFUSES}no two in a row"),
        ("{{ 1 // 0 }}", "gpt", f"{REFUSES}integer division or modulo by zero"),
        ("{{ messages + 1 }}", "gpt", f"{REFUSES}can only concatenate list"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_named(template, speaker, problem):
    conversation = [{"from": speaker, "value": "yes"}]
    text, _ = ChatTokenizer(make_tokenizer(template), template, 64)(["x7", "sound"], [conversation, TWO_TURNS])
    assert len(text.tokens) == 0
    assert text.problem.startswith(f"sample 'x7': {problem}")


def test_the_digest_follows_all_that_decides_tokens_and_labels():
    def digest(template: str = GEMMA_TEMPLATE, max_tokens: int = 64) -> str:
        return ChatTokenizer(tokenizer, template, max_tokens).digest

    tokenizer = make_tokenizer()
    first = digest()
    assert first not in (digest(max_tokens=65), digest(GEMMA_TEMPLATE + " "))
    tokenizer.eos_token = "<end_of_turn>"  # a template may write it
    assert digest() != first
    tokenizer = make_tokenizer()
    assert digest() == first
    tokenizer.add_tokens(["purple"])
    assert digest() != first


def save(tokenizer: Any, folder: Path) -> str:
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_without_template_needs_one_in_the_config(tmp_path):
    folder = save(make_tokenizer(None), tmp_path / "model")
    with pytest.raises(ConfigError, match="no chat template"):
        load_chat_tokenizer(folder, None, 64)
    (tmp_path / "template.jinja").write_text(GEMMA_TEMPLATE)
    assert load_chat_tokenizer(folder, str(tmp_path / "template.jinja"), 64).template == GEMMA_TEMPLATE


@pytest.mark.parametrize("own", [True, False])
def test_a_template_that_is_no_jinja_is_refused_once(tmp_path, own):
    broken, file = "{{ bos_token }}\n{% for m in messages %}{{ m", tmp_path / "template.jinja"
    file.write_text(broken)
    folder = save(make_tokenizer(broken if own else GEMMA_TEMPLATE), tmp_path / "model")
    where = f"of the tokenizer of '{folder}'" if own else str(file)
    with pytest.raises(ConfigError, match=f"the chat template {where} is broken in line 2: unexpected end of template"):
        load_chat_tokenizer(folder, None if own else str(file), 64)


def test_a_folder_without_a_tokenizer_gives_no_empty_one(language_model, tmp_path):
    alone = shutil.copytree(language_model, tmp_path / "alone", ignore=shutil.ignore_patterns("*token*", "chat*"))
    for folder in (alone, tmp_path):
        with pytest.raises(ModelError, match=r"no tokenizer can be loaded from .*: no file there is a tokenizer's$"):
            load_chat_tokenizer(str(folder), None, 64)


def test_code_that_a_folder_brings_is_never_run(tmp_path):
    folder = Path(save(make_tokenizer(), tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": [None, "theirs.Theirs"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with contextlib.suppress(ModelError):
        load_chat_tokenizer(str(folder), None, 64)
    assert not (tmp_path / "ran").exists()

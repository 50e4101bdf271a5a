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


def test_labels_are_the_assistants_tokens_and_its_end_of_turn():
    words, labels = labelled(TWO_TURNS)
    assert labels == ["a", "red", "square", "<end_of_turn>", "yes", "<end_of_turn>"]
    assert words[:4] == ["<bos>", "<start_of_turn>", "user", "\n"]
    assert words.count("<bos>") == 1


def test_a_template_without_bos_gets_one_all_the_same():
    without = GEMMA_TEMPLATE.replace("{{ bos_token }}", "")
    assert labelled(TWO_TURNS, template=without) == labelled(TWO_TURNS)


def test_nothing_after_the_last_label_is_kept():
    words, labels = labelled(TWO_TURNS[:3])
    assert words[-1] == "<end_of_turn>"
    assert labels == ["a", "red", "square", "<end_of_turn>"]


def test_a_text_cut_before_the_assistant_speaks_is_empty():
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
def test_image_markers_vanish_wherever_they_stand(value, content):
    assert to_messages([{"from": "human", "value": value}]) == [{"role": "user", "content": content}]


def test_an_answer_that_comes_first_is_learned_as_one_to_the_image():
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


def problem_of(conversation: list[dict[str, str]], template: str = GEMMA_TEMPLATE) -> str:
    texts = ChatTokenizer(make_tokenizer(template), template, 64)(["x7", "sound"], [conversation, TWO_TURNS])
    assert len(texts[0].tokens) == 0
    return texts[0].problem


def test_an_unknown_role_leaves_its_sample_out_and_names_it():
    assert problem_of([{"from": "robot", "value": ""}]).startswith(
        "sample 'x7': unknown role 'robot'; known are human,"
    )


def test_a_template_that_rewrites_earlier_turns_is_refused():
    last_only = "{% for m in messages %}{% if loop.last %}{{ m['role'] + m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"set model\.chat_template"):
        labelled(TWO_TURNS, template=last_only)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('no two in a row') }}", "no two in a row"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{{ messages + 1 }}", "can only concatenate list"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_named(template, problem):
    said = problem_of(TWO_TURNS, template)
    assert said.startswith(f"sample 'x7': the chat template refuses it: {problem}")


def test_the_digest_follows_all_that_decides_tokens_and_labels():
    tokenizer = make_tokenizer()
    digest = ChatTokenizer(tokenizer, GEMMA_TEMPLATE, 64).digest
    assert digest == ChatTokenizer(make_tokenizer(), GEMMA_TEMPLATE, 64).digest
    assert digest != ChatTokenizer(tokenizer, GEMMA_TEMPLATE, 65).digest
    assert digest != ChatTokenizer(tokenizer, GEMMA_TEMPLATE + " ", 64).digest
    tokenizer.eos_token = "<end_of_turn>"  # a template may write it
    assert digest != ChatTokenizer(tokenizer, GEMMA_TEMPLATE, 64).digest
    tokenizer.eos_token = "<eos>"
    assert digest == ChatTokenizer(tokenizer, GEMMA_TEMPLATE, 64).digest
    tokenizer.add_tokens(["purple"])
    assert digest != ChatTokenizer(tokenizer, GEMMA_TEMPLATE, 64).digest


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


def test_a_folder_of_a_model_alone_is_no_empty_tokenizer(language_model, tmp_path):
    alone = shutil.copytree(language_model, tmp_path / "alone", ignore=shutil.ignore_patterns("*token*", "chat*"))
    with pytest.raises(ModelError, match="no file there is a tokenizer's"):
        load_chat_tokenizer(str(alone), None, 64)


def test_code_that_a_folder_brings_is_never_run(tmp_path):
    folder = Path(save(make_tokenizer(), tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": [None, "theirs.Theirs"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with contextlib.suppress(ModelError):
        load_chat_tokenizer(str(folder), None, 64)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_tokenizer_is_refused_in_one_line(tmp_path):
    with pytest.raises(ModelError, match="no tokenizer can be loaded") as caught:
        load_chat_tokenizer(str(tmp_path), None, 64)
    assert "\n" not in str(caught.value)

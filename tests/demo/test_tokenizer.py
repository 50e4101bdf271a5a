"""The small tokenizer loses nothing, and the trainer finds the assistant's words in its chat template."""

import pytest
from transformers import PreTrainedTokenizerFast

from demo.conversations import KINDS, converse
from demo.scenes import COLOURS, SHAPES, compose
from trainer.text.chat import load_chat_tokenizer


@pytest.fixture
def tokenizer(school) -> PreTrainedTokenizerFast:
    return school.tokenizer


def test_captions_of_other_scenes_round_trip_without_unknowns(tokenizer):
    for number in range(12):
        caption = compose(1, number).caption
        tokens = tokenizer(caption, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == caption


def test_every_colour_and_shape_is_one_token(tokenizer):
    for word in (*COLOURS, *SHAPES):
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_labels_are_what_the_assistant_says(tokenizer, tmp_path, number):
    tokenizer.save_pretrained(tmp_path)
    conversation = converse(compose(1, number), number)
    [text] = load_chat_tokenizer(str(tmp_path), None, 128)(["a"], [conversation])
    spoken = [turn["value"] for turn in conversation if turn["from"] == "gpt"]
    assert tokenizer.decode(text.tokens[text.is_label]) == "".join(f"{turn}<end_of_turn>" for turn in spoken)
    assert tokenizer.decode(text.tokens).startswith("<bos><start_of_turn>user\n")

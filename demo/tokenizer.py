"""A word-level tokenizer with Gemma's chat template.

A token is a word with the space before it, a mark, or a line break, so tokens joined are the text again.
"""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo.conversations import Turn
from trainer.text.chat import to_messages

NOTES_BEGIN, NOTES_END = "<notes>", "</notes>"
"""Tokens around the notes that the language model learns to read; see demo/language_model.py."""

SPECIAL_TOKENS = ["<pad>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", NOTES_BEGIN, NOTES_END]

CHAT_TEMPLATE = """\
{{ bos_token }}\
{% for message in messages %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] + '<end_of_turn>\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


def make_tokenizer(conversations: Sequence[Sequence[Turn]]) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose vocabulary is every word of these conversations."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]|\s"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    messages = (message for conversation in conversations for message in to_messages(conversation))
    texts = (message["content"] for message in messages)
    words = trainers.WordLevelTrainer(special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(["user\nmodel\n", *texts], words)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast

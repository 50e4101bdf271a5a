"""What jsonargparse says about a wrong option, in the words of whoever wrote the option.

Its messages speak of parser keys and of Python's types; a message of a form that is not known here stays as it is.
"""

import re
from collections.abc import Callable

TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "list[int]": "a list of whole numbers",
}
NO_VALUE = "<class 'NoneType'>"
ONE_TYPE = re.compile(r"<class '\w+'>|[\w.]+\[.*?\]")


MAX_VALUE, MAX_LINE = 200, 1_000
"""Characters shown of a value, and of a message: a file may hold any amount."""


def plain_words(message: str) -> str:
    """The message on one line."""
    line = " ".join(message.split())
    for pattern, words in FORMS.items():
        if match := re.fullmatch(pattern, line):
            line = words(*match.groups())
            break
    return shortened(line, MAX_LINE)


def shortened(text: str, characters: int = MAX_VALUE) -> str:
    return text if len(text) <= characters else f"{text[:characters]}…"


def wrong_type(key: str, types: str, value: str) -> str:
    accepted = [each for each in ONE_TYPE.findall(types) if each != NO_VALUE]  # nobody types null to mend a value
    expected = [type_words(each) for each in accepted]
    return f"{key} must be {' or '.join(expected)}, got {shortened(value)}"


def type_words(annotation: str) -> str:
    if literal := re.fullmatch(r"typing\.Literal\[(.+)\]", annotation):
        choices = [choice.strip("'") for choice in literal[1].split(", ")]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    name = annotation.removeprefix("<class '").removesuffix("'>")
    return TYPE_WORDS.get(name, name)


def no_section(key: str, value: object) -> str:
    found = "nothing" if value is None else shortened(repr(value))
    return f"{key} is a section of fields, got {found}; give it fields or leave it out"


def missing_fields(keys: str) -> str:
    """Without the command's name, which jsonargparse puts before each."""
    return f"missing: {', '.join(key.partition('.')[2] or key for key in keys.split(', '))}"


FORMS: dict[str, Callable[..., str]] = {
    r'Parser key "(.+?)": Expected an? (.+)\. Got value: (.*)': wrong_type,
    r'Parser key "(.+?)": Does not .* Subtypes: \[(.+)\] Errors: .* Given value: (.*)': wrong_type,
    r'Parser key "(.+?)": Unable to load config \'(.*?)\' - .*': no_section,
    r'Parser key "config": File does not exist: \'(.+)\'': "config: {} does not exist".format,
    r'Parser key "config": Path is not a file: \'(.+)\'': "config: {} is not a file".format,
    r"Subcommand '\w+' does not accept option '(.+)'": "there is no field {}".format,
    r"the following arguments are required: (.+)": missing_fields,
}

"""Messages name files, fields, options, numbers and commands; tests leave their sentences free."""


def assert_names(message: object, names: str) -> None:
    """Check that a message has each of the words."""
    assert [name for name in names.split() if name not in str(message)] == [], message

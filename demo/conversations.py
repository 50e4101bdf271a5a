"""Write conversations about scenes in LLaVA's form: one or two turns, `<image>` in different places.

Each colour and shape is asked for before the text names it, so only the image (or luck) can give the answer.
"""

from collections.abc import Callable

from demo.scenes import PLACES, Scene

Turn = dict[str, str]


def exchange(*texts: str) -> list[Turn]:
    """Make alternating turns, the human's first."""
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


def describe_after_image(scene: Scene) -> list[Turn]:
    return exchange("<image>\nDescribe the scene.", scene.caption)


def describe_before_image(scene: Scene) -> list[Turn]:
    return exchange("What do you see?\n<image>", scene.caption)


def one_by_one(scene: Scene) -> list[Turn]:
    here, there = PLACES[scene.relation]
    question = f"In this picture <image>, what is {here}?"
    return exchange(question, f"a {scene.first.name}.", f"What is {there}?", f"a {scene.second.name}.")


KINDS: tuple[Callable[[Scene], list[Turn]], ...] = (describe_after_image, describe_before_image, one_by_one)


def converse(scene: Scene, number: int) -> list[Turn]:
    """Make the conversation of scene `number`; the kinds alternate."""
    return KINDS[number % len(KINDS)](scene)

"""The command `generate`: print the language model's answers about images that a trained projector gives it."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from cache_store.program.output_file import refuse_inside, refuse_output, write_output
from cache_store.storage.store import local_path
from trainer.data.buckets import parts_alike
from trainer.generate.generate_config import GenerateConfig
from trainer.generate.generator import Answer, Generator, find_language_model, open_generator
from trainer.generate.subjects import Subject, Subjects, find_subjects
from trainer.run.figures import answer_lines, shown_answer
from trainer.run.load_projector import load_projector
from trainer.run.parallel import local_device


def generate(run: str, config: GenerateConfig) -> None:
    """Print an answer for each image; with `report`, write them as JSON too."""
    projector = load_projector(run)
    report = local_path("report", config.report) if config.report else None
    if report:
        refuse_output("report", report, projector.path)
    language_model = find_language_model(projector, config.language_model)
    asked = find_subjects(projector, config)
    if report:
        for cache in asked.caches:
            refuse_inside("report", report, cache)
    generator = open_generator(projector, language_model, config, local_device(0))
    torch.manual_seed(config.seed)
    records = []
    for subject, answer in generate_answers(generator, asked, config.batch_size):
        print(*printed_lines(subject, answer), sep="\n")
        records.append(answer_record(subject, answer))
    if report:
        said = {"projector": str(projector.path), "steps": projector.config.training.steps, "answers": records}
        write_output(report, json.dumps(said, indent=1, ensure_ascii=False).encode() + b"\n")


def generate_answers(generator: Generator, asked: Subjects, batch_size: int) -> Iterator[tuple[Subject, Answer]]:
    for part in parts_alike(asked.sizes_N, batch_size):
        subjects = asked.subjects[part]
        said = generator(asked.read(part), [each.messages for each in subjects])
        yield from zip(subjects, said, strict=True)


def answer_record(subject: Subject, answer: Answer) -> dict[str, Any]:
    """Return one answer as a record of the report."""
    asked = {**subject.record, "prompt": prompt_of(subject)}
    reference = {} if subject.reference is None else {"reference": subject.reference}
    return asked | {"answer": answer.text, "is_whole": answer.is_whole} | reference


def prompt_of(subject: Subject) -> str:
    return "\n".join(each["content"] for each in subject.messages)


def printed_lines(subject: Subject, answer: Answer) -> Iterator[str]:
    """Return the printed lines of one answer, under the title of its image."""
    parts = {"prompt": prompt_of(subject), "answer": shown_answer(answer.text, is_whole=answer.is_whole)}
    return answer_lines(subject.title, parts | ({} if subject.reference is None else {"reference": subject.reference}))

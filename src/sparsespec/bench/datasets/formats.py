"""The public formats of reasoning benchmarks: which fields a record has, and what to ask a model with it.

A format is recognised by its fields alone. AIME goes round in several spellings (`problem`, `Problem`, `question`; with
`answer` or `Answer`); OlympiadBench has `question`, `final_answer` and `modality` (its folders and configurations such as
OE_TO_maths_en_COMP hold one subset each); LiveCodeBench has `question_content`, `starter_code` and test cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsespec.core.errors import InvalidValueError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One entry of a dataset. text: what the model is asked, or a text to continue. answer: the reference, if there is one."""

    name: str
    text: str
    answer: str | None = None


@dataclass(frozen=True)
class Format:
    """text, evidence: field names; a record fits that has one of each. answer, ids: where the answer and a name may be.

    keep: False for records to pass over (problems with images). ask: (record, its text) → prompt.
    """

    text: tuple[str, ...]
    ask: Callable[[Record, str], str]
    evidence: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    keep: Callable[[Record], bool] = lambda record: True

    def fits(self, record: Record) -> bool:
        """Whether the record has the fields."""
        return all(any(field in record for field in names) for names in (self.text, self.evidence) if names)

    def wanted(self) -> str:
        """The fields in words."""
        return " and ".join("/".join(names) for names in (self.text, self.evidence) if names)

    def question(self, record: Record, index: int, where: str) -> Question:
        """The record as a question. Raises InvalidValueError for one without text."""
        text = next((v for v in map(record.get, self.text) if isinstance(v, str) and v.strip()), None)  # a number is no text
        if text is None:
            raise InvalidValueError(f"{where}[{index}]", sorted(record), f"{'/'.join(self.text)} is empty", "Remove the record")
        return Question(_first(record, self.ids) or str(index), self.ask(record, text.strip()), _first(record, self.answer))


def _first(record: Record, names: Sequence[str]) -> str | None:
    """The first of these fields that holds something; a list becomes its items with commas between."""
    value = next((record[f] for f in names if record.get(f) not in (None, "", [])), None)
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else None if value is None else str(value)


def _text_only(record: Record) -> bool:
    """OlympiadBench marks a problem with pictures in `modality`, and fills image_1, image_2, ..."""
    images = any(value for field, value in record.items() if field.startswith("image"))
    return not images and str(record.get("modality") or "Text-only").lower().startswith("text")


def _mathematics(record: Record, text: str) -> str:
    return f"{text}\n\nThink step by step and give the final answer, an integer from 0 to 999, in \\boxed{{}}."


def _olympiad(record: Record, text: str) -> str:
    context, unit = _first(record, ("context",)), _first(record, ("unit",))
    several = " There is more than one answer: give all of them, separated by commas." if record.get("is_multiple_answer") else ""
    return (f"{context.strip()}\n\n" if context else "") + (
        f"{text}\n\nThink step by step and give the final answer{f' in {unit}' if unit else ''} in \\boxed{{}}.{several}")


def _programming(record: Record, text: str) -> str:
    title, starter = _first(record, ("question_title",)), _first(record, ("starter_code",))
    form = (f"Complete this code:\n\n```python\n{starter.strip()}\n```" if starter else
            "The program reads standard input and writes the answer to standard output.")
    return (f"# {title}\n\n" if title else "") + f"{text}\n\nSolve this in Python. Think first, then write the code. {form}"


# The first that fits is taken, so those with more telling fields come first.
FORMATS: dict[str, Format] = {
    "livecodebench": Format(("question_content",), _programming, evidence=("public_test_cases", "starter_code", "platform"),
                            ids=("question_id", "question_title")),
    "olympiadbench": Format(("question",), _olympiad, evidence=("final_answer", "modality"), answer=("final_answer",), ids=("id",),
                            keep=_text_only),
    "aime": Format(("problem", "Problem", "question", "Question"), _mathematics, evidence=("answer", "Answer"),
                   answer=("answer", "Answer"), ids=("ID", "id", "url")),
    "prompts": Format(("prompt",), lambda record, text: text, ids=("id", "name")),
}


def recognise(records: Sequence[Record], where: str, name: str | None = None) -> tuple[str, Format]:
    """The format of the records, or `name` after a check. Raises InvalidValueError with the fields found and those wanted."""
    if name is not None and name not in FORMATS:
        raise InvalidValueError("dataset", name, "unknown format", f"Choose from: {', '.join(FORMATS)}")
    candidates = FORMATS if name is None else {name: FORMATS[name]}
    first = records[0]
    for label, form in candidates.items():
        if form.fits(first):
            return label, form
    found = ", ".join(sorted(map(str, first))) or "none"
    wanted = "; ".join(f"{label}: {form.wanted()}" for label, form in candidates.items())
    raise InvalidValueError("dataset", where, f"its records fit no known format: fields found: {found}", f"Wanted: {wanted}")


def questions(records: Sequence[Record], where: str, name: str | None = None) -> tuple[str, list[Question]]:
    """(format, questions). Raises InvalidValueError where no record is left or one does not fit."""
    if not records:
        raise InvalidValueError("dataset", where, "holds no records", "Give a file that has some")
    label, form = recognise(records, where, name)
    out = []
    for index, record in enumerate(records):
        if not form.fits(record):
            raise InvalidValueError(f"{where}[{index}]", sorted(record), f"not a record of {label}", "Remove or repair it")
        if form.keep(record):
            out.append(form.question(record, index, where))
    if not out:
        raise InvalidValueError("dataset", where, f"none of its {len(records)} records is text-only",
                                "Give a text-only subset")
    return label, out

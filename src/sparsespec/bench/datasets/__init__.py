"""Prompts for benchmarks: shipped sets, public benchmarks in their own formats, random ids and length traces.

    dataset = load("aime=problems.jsonl")            # or "code", "reasoning", "olympiadbench=hub:NAME", "notes.txt", ...
    items = build(dataset, llm, count=4, length=None)
"""

from sparsespec.bench.datasets.build import Dataset, Item, build, random_ids
from sparsespec.bench.datasets.formats import FORMATS, Question
from sparsespec.bench.datasets.load import SHIPPED, load
from sparsespec.bench.datasets.shipped import problems
from sparsespec.bench.datasets.traces import TRACES, Trace

__all__ = ["FORMATS", "SHIPPED", "TRACES", "Dataset", "Item", "Question", "Trace", "build", "load", "problems", "random_ids"]

"""`sparsespec generate`: text for one or many prompts.

sparsespec generate "Why is the sky blue?" --max-tokens 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sparsespec.cli.flags import add_engine_flags, add_sampling_flags, engine_kwargs, sampling_params
from sparsespec.cli.prompts import Prompt, read_prompts, to_engine

MAX_TOKENS = 256


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="generate text for one or many prompts", allow_abbrev=False)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompt text; with none, stdin is one prompt")
    parser.add_argument("--input-file", metavar="FILE", help=".jsonl (a string, or an object with prompt, prompt_token_ids or "
                        "messages, a line) or text with one prompt a line; - is stdin")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--chat", dest="chat", action="store_true", default=None,
                      help="apply the chat template (default where the model has one)")
    kind.add_argument("--raw", dest="chat", action="store_false", help="send the prompt as it is")
    parser.add_argument("--json", action="store_true", help="one JSON document with text, token ids and counters")
    add_sampling_flags(parser, max_tokens=MAX_TOKENS)
    add_engine_flags(parser)
    parser.set_defaults(command=run)


def deltas(steps: Iterator[Any]) -> Iterator[str]:
    """New text of the first completion at each step of a stream whose outputs carry all text so far."""
    shown = 0
    for step in steps:
        text = step.outputs[0].text
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)


def run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts, args.input_file)
    params = sampling_params(args, max_tokens=MAX_TOKENS)
    from sparsespec.llm import LLM

    llm = LLM(**engine_kwargs(args))
    ready = [to_engine(llm, prompt, args.chat) for prompt in prompts]
    if len(prompts) == 1 and params.n == 1 and not args.json:
        for delta in deltas(llm.stream(ready[0], params)):
            print(delta, end="", flush=True)
        print()
        return 0
    outputs = llm.generate(ready, params, use_tqdm=sys.stderr.isatty())
    if args.json:
        print(json.dumps({"outputs": [_document(o, p) for o, p in zip(outputs, prompts, strict=True)], "stats": llm.stats()}))
        return 0
    for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True), 1):
        for completion in output.outputs:
            which = f"{number}.{completion.index + 1}" if params.n > 1 else str(number)
            print(f"--- {which}: {_title(prompt)}\n{completion.text}\n")
    return 0


def _title(prompt: Prompt) -> str:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."


def _document(output: Any, prompt: Prompt) -> dict[str, Any]:
    return {"request_id": output.request_id, "prompt": prompt, "prompt_token_ids": output.prompt_token_ids,
            "num_cached_tokens": output.num_cached_tokens, "lossless": output.lossless,
            "prompt_logprobs": _plain(output.prompt_logprobs),
            "completions": [{**asdict(c), "logprobs": _plain(c.logprobs)} for c in output.outputs]}


def _plain(logprobs: list[Any] | None) -> list[Any] | None:
    """Per position {token id: {logprob, rank, decoded_token}} as JSON can hold it."""
    return logprobs and [position and {str(token): asdict(lp) for token, lp in position.items()} for position in logprobs]

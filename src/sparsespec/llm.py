"""The offline face: `LLM.generate`, `LLM.chat` and `LLM.stream`, with vLLM's names.

    from sparsespec import LLM, SamplingParams
    print(LLM().generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from sparsespec.config.engine import EngineConfig
from sparsespec.core.errors import BatchError, InvalidValueError, SparseSpecError
from sparsespec.core.outputs import RequestOutput
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.engine.admission import Prompt
from sparsespec.engine.engine import Engine
from sparsespec.engine.weights import WeightSource
from sparsespec.loader.loaded import LoadedModel

Message = dict[str, Any]


class LLM:
    """A model and its engine.

    model: Hugging Face directory, GGUF file or hub name; None: the embedded SmolLM2-135M-Instruct; or a LoadedModel, which
    shares weights between engines. Further settings are those of EngineConfig by their flat names; unknown ones are errors.
    speculative_config: a dict of SpeculativeConfig's fields; None: its defaults; {"method": "none"}: plain decoding.
    """

    def __init__(self, model: str | LoadedModel | None = None, tokenizer: str | None = None, *,
                 speculative_config: dict[str, Any] | None = None, **settings: Any) -> None:
        loaded = model if isinstance(model, LoadedModel) else None
        name = loaded.name if loaded else None if model is None else str(model)
        config = EngineConfig.from_kwargs(model=name, tokenizer=tokenizer, speculative_config=speculative_config, **settings)
        self.engine = Engine(config, loaded)
        self._count = 0

    @property
    def loaded(self) -> LoadedModel:
        """The weights, to give to another LLM."""
        return self.engine.loaded

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, or None under skip_tokenizer_init."""
        return self.loaded.tokenizer

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete prompts; results in input order.

        prompts: text, {"prompt_token_ids": [...]}, a list of token ids, or a list of these. sampling_params: one for all, or
        one each. A prompt that can't be served does not keep the others from finishing: then a single prompt raises its
        error and several raise BatchError, which holds the others' outputs.
        """
        many, items = _as_list(prompts)
        params = _per_prompt(sampling_params, len(items))
        ids, errors = [], dict[int, Exception]()
        for index, (prompt, p) in enumerate(zip(items, params, strict=True)):
            ids.append(self._next_id())
            try:
                self.engine.add_request(ids[-1], prompt, p)
            except SparseSpecError as error:
                errors[index] = error
        try:
            done = self._run(ids, len(items) - len(errors), use_tqdm)
        except BaseException:  # an interrupt included: nothing of this call may stay in the engine
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        outputs = [done.get(i) for i in ids]
        errors.update({i: o.error for i, o in enumerate(outputs) if o is not None and o.error is not None})
        if errors and not many:
            raise errors[0]
        if errors:
            raise BatchError(errors, outputs)
        return [o for o in outputs if o is not None]

    def chat(self, messages: list[Message] | list[list[Message]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True, *,
             add_generation_prompt: bool = True, chat_template: str | None = None,
             chat_template_kwargs: dict[str, Any] | None = None) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        if not messages:
            raise InvalidValueError("messages", messages, "empty", 'Give [{"role": "user", "content": "..."}]')
        single = isinstance(messages[0], dict)
        prompts = [self.apply_chat_template(m, add_generation_prompt, chat_template, chat_template_kwargs)  # type: ignore[arg-type]
                   for m in ([messages] if single else messages)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def apply_chat_template(self, messages: list[Message], add_generation_prompt: bool = True, chat_template: str | None = None,
                            kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """The prompt of a conversation, as {"prompt": text, "prompt_token_ids": [...]}."""
        tokenizer = self.loaded.tokenizer
        if tokenizer is None or not (chat_template or tokenizer.chat_template):
            raise InvalidValueError("chat_template", chat_template, "the model brings none", "Give one, or use generate()")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt,
                                             chat_template=chat_template, **(kwargs or {}))
        return {"prompt": text, "prompt_token_ids": list(tokenizer(text, add_special_tokens=False)["input_ids"])}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, giving its output so far after every step that adds to it. Closing the iterator aborts it."""
        request_id = self._next_id()
        self.engine.add_request(request_id, prompt, sampling_params or SamplingParams(), stream=True)
        try:
            while request_id in self.engine.groups:
                for output in self.engine.step():
                    if output.request_id == request_id:
                        if output.error is not None:
                            raise output.error
                        yield output
        finally:
            self.engine.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.engine.reset_prefix_cache()

    def update_weights(self, source: WeightSource) -> None:
        """Replace the weights by those of a path, or of Hugging Face names → tensors (a mapping, or pairs); see Engine."""
        self.engine.update_weights(source)

    def sleep(self, level: int = 1) -> None:
        """Give device memory back while nothing runs. Level 1 keeps the weights on the host, level 2 drops them; see Engine."""
        self.engine.sleep(level)

    def wake_up(self) -> None:
        """End a sleep; after level 2 update_weights() has to follow."""
        self.engine.wake_up()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as a plain dict."""
        return self.engine.stats()

    def _next_id(self) -> str:
        self._count += 1
        return str(self._count - 1)

    def _run(self, ids: list[str], total: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        wanted, done = set(ids), dict[str, RequestOutput]()
        tokens = 0
        with tqdm(total=total, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while len(done) < total:
                for output in self.engine.step():
                    if output.request_id not in wanted:
                        continue
                    done[output.request_id] = output
                    tokens += sum(len(c.token_ids) for c in output.outputs)
                    rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.1f} tok/s")
                    bar.update()
        return done


def _as_list(prompts: Prompt | Sequence[Prompt]) -> tuple[bool, list[Prompt]]:
    """(whether several were given, the prompts as a list). A flat list of integers is one prompt."""
    if isinstance(prompts, (str, dict)) or (prompts and all(isinstance(i, int) for i in prompts)):
        return False, [prompts]  # type: ignore[list-item]
    if not prompts:
        raise InvalidValueError("prompts", prompts, "empty", "Give at least one prompt")
    return True, list(prompts)  # type: ignore[arg-type]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidValueError("sampling_params", f"{len(params)} of them", f"there are {count} prompts",
                                "Give one, or one a prompt")
    return list(params)

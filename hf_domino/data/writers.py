"""Let the target continue prompts, in this process or on a server with OpenAI's completions API.

The server is vLLM or SGLang, which run a large target faster. Prompts are sent as token ids, so the chat template is
applied here, and both servers return token ids on request.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import (
    Cache,
    LogitsProcessor,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TopPLogitsWarper,
)

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino.configuration.from_target import eos_ids_of
from hf_domino.targets.packed import packed_linears
from hf_domino.targets.view import input_device

# These values switch off any truncation that a target's generation configuration asks for.
UNTRUNCATED = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
UNTRUNCATED_THERE = {"top_k": -1, "min_p": 0.0}  # the same for a server
ONE_TEXT = {"num_beams": 1, "num_return_sequences": 1}  # one text per prompt, whatever the target's configuration says
# Options of a generation configuration that depend on where a call of `generate` starts or ends, so that it cannot be
# split. The second ones do so unless they are 1.
OF_THE_CALL = (
    "min_new_tokens", "exponential_decay_length_penalty", "begin_suppress_tokens", "max_time", "forced_eos_token_id",
)  # fmt: skip
FACTORS_OF_THE_CALL = ("guidance_scale", "encoder_repetition_penalty")
CHUNK = 32  # tokens between two checks for finished sequences; a check costs about one decode step
SEED_STRIDE = 1_000_003  # distance between the seeds of two runs, so that their batches do not share seeds
MAX_RETRIES = 5
STEPS = "tokens of each text of the batch"
# Fields in which vLLM and SGLang return the token that ended a text. vLLM leaves out the tokenizer's own end token.
STOP_REASONS = ("stop_reason", "matched_stop")
KEY = "OPENAI_API_KEY"  # environment variable


@dataclass(frozen=True)
class Sampling:
    """How a text is sampled; by default from the target's own distribution, up to the target's own end tokens."""

    max_new_tokens: int
    temperature: float  # 0 is greedy
    top_p: float = 1.0
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Written:
    """A text as token ids, including its end token if it has ended."""

    ids: list[int]
    ended: bool


class TargetWriter:
    """Let a target in this process continue prompts.

    Args:
        target (`PreTrainedModel`): The target in evaluation mode.
        chunk (`int`, *optional*): Number of tokens after which finished sequences leave the batch, so that the batch
            does not keep computing them while a few long texts go on. By default, they stay. With another chunk, the
            same seed gives different texts.
        progress (`bool`, *optional*, defaults to `False`): Whether to show how many tokens of a batch are written.
    """

    def __init__(self, target: PreTrainedModel, chunk: int | None = None, progress: bool = False):
        config = target.generation_config
        is_whole = any(getattr(config, name, None) is not None for name in OF_THE_CALL)
        is_whole |= any(getattr(config, name, None) not in (None, 1) for name in FACTORS_OF_THE_CALL)
        self.target = target
        self.chunk = None if is_whole else chunk
        self.progress = progress

    def write(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[Written]:
        """Continue a batch of prompts.

        Args:
            prompts (`list[list[int]]`): Token ids, none empty.
            sampling (`Sampling`): How to sample. Truncation that the target's generation configuration asks for is
                ignored.
            seed (`int`): Random seed for sampling. The global random state of torch is not changed.

        Returns:
            `list[Written]`: For each prompt, the text that follows it.
        """
        device = input_device(self.target)
        devices = [device] if device.type == "cuda" else []
        bar = tqdm(total=sampling.max_new_tokens, desc=STEPS, unit="token", leave=False, disable=not self.progress)
        with torch.random.fork_rng(devices=devices), packed_linears(self.target), bar:
            torch.manual_seed(seed)
            return self._continue([torch.tensor(prompt, device=device) for prompt in prompts], sampling, bar.update)

    def _continue(
        self, prompts: list[torch.Tensor], sampling: Sampling, written: Callable[[int], Any]
    ) -> list[Written]:
        config = self.target.generation_config
        ends = sampling.ends or eos_ids_of(config)
        pad_token_id = config.pad_token_id or 0
        texts: list[list[int]] = [[] for _ in prompts]
        masks = [torch.ones_like(prompt) for prompt in prompts]
        inputs: dict[str, Any] = {
            "input_ids": pad_sequence(prompts, True, pad_token_id, padding_side="left"),
            "attention_mask": pad_sequence(masks, True, padding_side="left"),
        }
        draws = sampling.temperature > 0 and inputs["input_ids"].device.type == "cpu"
        arguments: dict[str, Any] = {**ONE_TEXT, "do_sample": sampling.temperature > 0, "pad_token_id": pad_token_id}
        if draws:
            arguments |= {"do_sample": False, "logits_processor": [DrawnToken(sampling.temperature, sampling.top_p)]}
        elif sampling.temperature > 0:
            arguments |= {**UNTRUNCATED, "temperature": sampling.temperature, "top_p": sampling.top_p}
            if getattr(config, "min_p", None) is not None:  # only then, because it costs a pass over the logits
                arguments["min_p"] = 0.0
        if self.progress:
            arguments["stopping_criteria"] = StoppingCriteriaList([_Counter(written)])
        if sampling.ends:
            arguments["eos_token_id"] = list(sampling.ends)
        sequences = list(range(len(prompts)))
        left = sampling.max_new_tokens
        while sequences and left:
            output = self.target.generate(
                **inputs,
                max_new_tokens=min(self.chunk or left, left),
                return_dict_in_generate=True,
                **arguments,
            )
            new = output.sequences[:, inputs["input_ids"].shape[1] :]
            for sequence, ids in zip(sequences, new.tolist(), strict=True):
                texts[sequence] += ids
            stay = [place for place, sequence in enumerate(sequences) if not set(ends).intersection(texts[sequence])]
            left -= new.shape[1]
            if left and stay:
                index = torch.tensor(stay, device=new.device)
                mask = torch.nn.functional.pad(inputs["attention_mask"][index], (0, new.shape[1]), value=1)
                inputs = {"input_ids": output.sequences[index], "attention_mask": mask}
                cache = getattr(output, CACHE, None)
                if _has_read(cache, output.sequences.shape[1] - 1):
                    _keep_sequences(cache, index)
                    inputs[CACHE] = cache
            sequences = [sequences[place] for place in stay]
        return [cut_at_end(ids, ends) for ids in texts]


class DrawnToken(LogitsProcessor):
    """Draws the next token of each sequence, and leaves greedy decoding no other.

    `torch.multinomial` makes a random number for every token of the vocabulary. On a CPU, that took two thirds as long
    as the rest of a step with 64 sequences and 151,936 tokens; one number for each sequence takes a tenth of that.

    Args:
        temperature (`float`): Above 0.
        top_p (`float`, *optional*, defaults to 1.0): Share of the distribution that is drawn from.
    """

    def __init__(self, temperature: float, top_p: float = 1.0):
        self.temperature = temperature
        self.truncate = TopPLogitsWarper(top_p) if top_p < 1 else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]` that are 0 for the drawn tokens and -inf for all others."""
        scores = scores / self.temperature
        if self.truncate is not None:
            scores = self.truncate(input_ids, scores)
        sums = scores.softmax(dim=-1).cumsum(dim=-1)
        # Above 0 and at most the sum of all, so that it falls on a token with a probability.
        places = (1 - torch.rand(len(sums), 1)) * sums[:, -1:]
        drawn = torch.searchsorted(sums, places)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


class _Counter(StoppingCriteria):
    """Tell a progress bar of each token, and never stop a text."""

    def __init__(self, written: Callable[[int], Any]):
        self._written = written

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._written(1)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _has_read(cache: Any, num_tokens: int) -> bool:
    """Return whether a cache holds this many tokens; with another one, `generate` must read the text again."""
    if not isinstance(cache, Cache) or isinstance(cache, StaticCache):  # a static cache has room for one call
        return False
    try:
        return cache.get_seq_length() == num_tokens
    except ValueError:  # all layers are recurrent, so `generate` would not know how much the cache has read
        return False


def _keep_sequences(cache: Cache, index: torch.Tensor) -> None:
    """Keep the sequences of a cache whose numbers are in `index`."""
    # Recurrent layers only have `reorder_cache`. MiniMax's cache holds the states of such layers itself, and its own
    # `batch_select_indices` selects them.
    cache_class = type(cache)
    if cache_class.reorder_cache is Cache.reorder_cache and "batch_select_indices" in vars(cache_class):
        cache.batch_select_indices(index)
    else:
        cache.reorder_cache(index)


def _check_key(url: str) -> None:
    """Say to which machine the API key is sent, and raise an error if it would be readable on the way."""
    address = urlsplit(url)
    host = address.hostname or ""
    if host == "localhost" or host == "::1" or host.startswith("127."):
        return
    if address.scheme != "https":
        remedy = f"Unset {KEY} if the server needs none, or forward its port to localhost, as with ssh -L."
        raise invalid_argument(f"--endpoint with {KEY}", "https, or on this machine", url, remedy)
    notice(f"the key in {KEY} is sent to {host}. Unset it if the server needs none.")


def cut_at_end(ids: list[int], ends: tuple[int, ...]) -> Written:
    """Cut a text after its first end token."""
    length = next((index + 1 for index, token in enumerate(ids) if token in ends), None)
    return Written(ids[:length], length is not None)


class EndpointWriter:
    """Let a target on a server continue prompts.

    Args:
        url (`str`): Address of the API, such as `http://localhost:8000/v1`.
        model (`str`): The target's name on the server.
        ends (`Sequence[int]`): Token ids that end a text of the target. The first one is the server's own (the
            tokenizer's), which ended a text if the server does not say which token did.

    Raises:
        ValueError: If the package `openai` is not installed, or an API key would travel unencrypted.
    """

    def __init__(self, url: str, model: str, ends: Sequence[int]):
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ValueError("--endpoint needs the package openai: pip install openai.") from error
        key = os.environ.get(KEY) or "none"  # the client needs one, even if the server does not
        if key != "none":
            _check_key(url)
        self.client = OpenAI(base_url=url, api_key=key, max_retries=MAX_RETRIES)
        self.url = url
        self.model = model
        self.ends = tuple(ends)

    def write(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[Written]:
        """Continue a batch of prompts, all at once, like [`TargetWriter`].

        Args:
            prompts (`list[list[int]]`): Token ids, none empty.
            sampling (`Sampling`): How to sample.
            seed (`int`): Random seed for sampling. Equal prompts in a batch get different texts.

        Returns:
            `list[Written]`: For each prompt, the text that follows it.

        Raises:
            ConnectionError: If the server does not answer, rejects a request, or returns no token ids.
        """
        from openai import OpenAIError

        seeds = [zlib.crc32(f"{seed} {index}".encode()) for index in range(len(prompts))]
        with ThreadPoolExecutor(len(prompts)) as pool:
            try:
                return list(pool.map(lambda prompt, own: self._write_one(prompt, sampling, own), prompts, seeds))
            except (OpenAIError, AttributeError) as error:  # AttributeError if a choice has no token ids
                hint = "Check --endpoint and --endpoint-model, and that the server is vLLM's or SGLang's."
                raise ConnectionError(f"the endpoint {self.url} with model {self.model!r}: {error} {hint}") from error

    def _write_one(self, prompt: list[int], sampling: Sampling, seed: int) -> Written:
        ends = sampling.ends or self.ends
        completion = self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            extra_body={**UNTRUNCATED_THERE, "return_token_ids": True, "stop_token_ids": list(ends)},
        )
        choice: Any = completion.choices[0]
        ids = list(choice.token_ids)  # a field that OpenAI's own API does not have
        ended = choice.finish_reason == "stop"
        if ended and ends and (not ids or ids[-1] not in ends):  # servers do not return the end token
            reasons = (getattr(choice, name, None) for name in STOP_REASONS)
            ids.append(next((reason for reason in reasons if isinstance(reason, int)), self.ends[0]))
        return Written(ids, ended)


Writer = TargetWriter | EndpointWriter

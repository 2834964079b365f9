r"""Tokens a second of engines outside Transformers, on the prompts and the machine of `hf-domino bench`.

    python model_cards/workshop/benchmarks/other_engines.py --engine llama.cpp --model FILE --tokenizer FOLDER \
        --prompts PROMPTS --results other-engines.jsonl

FILE is the target's GGUF file, whose weights are quantised; our tables measure the same weights, dequantised. OpenVINO
GenAI reads a folder that `optimum-cli export openvino --weight-format fp16` makes of these. Engines that quantise or
fuse differently write other texts, so a row keeps the text, and no row says that it is equal. Install what an engine
needs first (`ENGINES`). Each engine has a process of its own, because the thread pools of two engines slow each other
down. A row is the answer to one prompt: greedy, as long as the rows of `hf-domino bench`, and timed from the token ids
of the prompt to the last token. The first prompt is answered once before anything is timed.
"""

from __future__ import annotations

import argparse
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from tqdm.auto import tqdm
from transformers import AutoTokenizer

from hf_domino._common.atomic_writes import check_writable, write_atomic
from hf_domino._common.provenance import provenance
from hf_domino.data.prompts import read_prompts
from hf_domino.evaluation.benchmark.prompts import encode, source
from hf_domino.evaluation.results import Result, read_results, to_lines

CONTEXT = 4096  # positions that llama.cpp reserves memory for


class Engine(ABC):
    """A way to generate outside Transformers."""

    package: ClassVar[str]  # to install, whose version the rows record

    @abstractmethod
    def generate(self, ids: list[int], max_new_tokens: int) -> tuple[str, int]:
        """Continue a prompt greedily; return the text and the number of its tokens."""


class LlamaCpp(Engine):
    """llama.cpp, by its server's code in this process.

    Args:
        options (`argparse.Namespace`): The command's.
        speculation (`str`, *optional*): One of its speculative types, such as `"NGRAM_SIMPLE"`; by default, none.
    """

    package = "xllamacpp"

    def __init__(self, options: argparse.Namespace, speculation: str | None = None):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(options.model)
        params.n_ctx = CONTEXT
        params.n_parallel = 1
        params.cpuparams.n_threads = options.threads
        params.cpuparams_batch.n_threads = options.threads
        params.verbosity = 0
        if speculation is not None:
            kinds = xllamacpp.common_speculative_type
            params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{speculation}")]
        if speculation == "DRAFT_SIMPLE":
            params.speculative.draft.mparams.path = str(options.draft_gguf)
            params.speculative.draft.cpuparams.n_threads = options.threads
            params.speculative.draft.cpuparams_batch.n_threads = options.threads
        self._server = xllamacpp.Server(params)

    def generate(self, ids: list[int], max_new_tokens: int) -> tuple[str, int]:
        """Continue a prompt, whose state is not kept for the next one."""
        about = {"prompt": ids, "n_predict": max_new_tokens, "temperature": 0, "cache_prompt": False}
        answer = self._server.handle_completions(about)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


class OpenVino(Engine):
    """OpenVINO GenAI, on a folder in its own format (it also reads some GGUF files).

    Args:
        options (`argparse.Namespace`): The command's.
        lookup_tokens (`int`, *optional*, defaults to 0): Tokens that its prompt lookup proposes; none by default.
    """

    package = "openvino-genai"
    ngram_size: ClassVar[int] = 3

    def __init__(self, options: argparse.Namespace, lookup_tokens: int = 0):
        import openvino_genai

        self._genai = openvino_genai
        self._lookup_tokens = lookup_tokens
        about: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
        if lookup_tokens:
            about["prompt_lookup"] = True
        self._pipeline = openvino_genai.LLMPipeline(str(options.model), "CPU", **about)

    def generate(self, ids: list[int], max_new_tokens: int) -> tuple[str, int]:
        """Continue a prompt."""
        import numpy
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.do_sample = False
        if self._lookup_tokens:
            config.num_assistant_tokens = self._lookup_tokens
            config.max_ngram_size = self.ngram_size
        tokens = numpy.array([ids], dtype=numpy.int64)
        mask = numpy.ones_like(tokens)
        inputs = self._genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(mask))
        output = self._pipeline.generate(inputs, config)
        return self._pipeline.get_tokenizer().decode(output.tokens[0]), len(output.tokens[0])


ENGINES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama.cpp": (LlamaCpp, {}),
    "llama.cpp, n-grams": (LlamaCpp, {"speculation": "NGRAM_SIMPLE"}),
    "llama.cpp, n-gram map": (LlamaCpp, {"speculation": "NGRAM_MAP_K4V"}),
    "llama.cpp, draft model": (LlamaCpp, {"speculation": "DRAFT_SIMPLE"}),
    "OpenVINO GenAI": (OpenVino, {}),
    "OpenVINO GenAI, prompt lookup": (OpenVino, {"lookup_tokens": 5}),
}


def measure(engine: Engine, name: str, options: argparse.Namespace) -> list[Result]:
    """Answer all prompts, and write their rows beside those of other engines."""
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    prompts = read_prompts(options.prompts, is_chat=True)[: options.num_prompts]
    kept = []
    if options.results.exists():
        kept = [row for row in read_results(options.results) if row.method != name]
    made = provenance() | {"threads": options.threads, engine.package: version(engine.package)}
    about = {
        "mode": "greedy",
        "temperature": 0.0,
        "target": options.name,
        "weights": options.model.name,
        "max_new_tokens": options.max_new_tokens,
        "batch_size": 1,
        "device": "cpu",
    }
    encoded = [encode(tokenizer, [prompt])["input_ids"][0].tolist() for prompt in prompts]
    engine.generate(encoded[0], options.max_new_tokens)
    rows = []
    for index, (prompt, ids) in enumerate(zip(tqdm(prompts, name), encoded, strict=True)):
        start = time.perf_counter()
        text, count = engine.generate(ids, options.max_new_tokens)
        seconds = time.perf_counter() - start
        settings = about | {"prompt": index, "sources": [source(prompt)], "prompt_tokens": len(ids)}
        figures = {"new_tokens": count, "seconds": seconds, "tokens_per_second": count / seconds, "text": text}
        figures["peak_memory"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows.append(Result(name, settings, figures, made))
        write_atomic(options.results, to_lines(kept + rows))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True, help="what is measured")
    parser.add_argument("--model", type=Path, required=True, help="the target's GGUF file, or for OpenVINO its folder")
    parser.add_argument("--draft-gguf", type=Path, help="GGUF file of a small model, for llama.cpp's draft model")
    parser.add_argument("--tokenizer", required=True, help="folder or Hub name of the target in Transformers")
    parser.add_argument("--name", help="the target's name in the rows (default: the tokenizer's folder)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts, as for hf-domino bench")
    parser.add_argument("--num-prompts", type=int, default=24, help="prompts from the first one on (default: 24)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="length of the answers (default: 64)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine (default: 2)")
    parser.add_argument("--results", type=Path, required=True, help="JSONL file; rows of other engines in it stay")
    options = parser.parse_args(arguments)
    options.name = options.name or Path(options.tokenizer).name
    check_writable(options.results.parent, "the folder of --results")
    if options.engine == "llama.cpp, draft model" and options.draft_gguf is None:
        parser.error("this engine needs --draft-gguf")
    made, chosen = ENGINES[options.engine]
    rows = measure(made(options, **chosen), options.engine, options)
    seconds = sum(row["seconds"] for row in rows)
    print(f"{options.engine}: {sum(row['new_tokens'] for row in rows) / seconds:.1f} tokens a second")


if __name__ == "__main__":
    main()

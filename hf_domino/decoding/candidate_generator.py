"""`DominoCandidateGenerator`: proposes the tokens of every round, with the drafter or by prompt lookup.

It subclasses Transformers' `CandidateGenerator`, and two loops can drive it. The package's own loop
(`decoding/loop.py`) uses the wide interface, which supports batches and trees: it calls `observe_prompt` once, and
then `plan`, `propose` and `observe_round` in each round. Transformers' assisted loop uses the narrow interface, which
supports one sequence and chains of proposals: `get_candidates` and `update_candidate_strategy`. Both interfaces draft
with the same session.

Shapes: B unfinished sequences, T tokens so far, P proposals, C context positions, N nodes, W = N + 1 positions of a
block, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.from_target import eos_ids_of
from hf_domino.decoding.caches import unrewindable
from hf_domino.decoding.call import open_session
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.policy import most_proposals, policy_for
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.prompt_lookup import PromptLookup, num_padding
from hf_domino.decoding.round import Outcome, Plan
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.stopping import KnownStops
from hf_domino.decoding.tree import Tree
from hf_domino.methods import DominoDraftModel
from hf_domino.stats.decoding_stats import DecodingStats, record_stats
from hf_domino.targets.compatibility import fitting_drafter
from hf_domino.targets.view import TargetModel

ONE_SEQUENCE = [0]


class DominoCandidateGenerator(CandidateGenerator):
    """Propose candidate tokens for assisted generation with a [`DominoDraftModel`].

    `model.generate(..., assistant_model=drafter)` creates one for each call. You only need this class if you write a
    loop of your own, or if you want to use Transformers' own assisted loop without the patch that `import hf_domino`
    installs. In that case, return it from the target's `_get_candidate_generator`, as the example shows. Transformers'
    loop handles one sequence at a time. Its greedy output equals that of plain `generate`. Its sampled output has the
    same distribution as plain `generate`, but the same seed gives a different text.

    Args:
        assistant_model ([`DominoDraftModel`]): The drafter. Every method works, including [`recycling`].
        target_model (`PreTrainedModel`): The model that generates.
        generation_config (`GenerationConfig`): The merged configuration of the call. `num_assistant_tokens` limits how
            many tokens a round drafts along one path. `prompt_lookup_num_tokens` turns on prompt lookup, and limits how
            many tokens it proposes in a round. A drafter with a `memory` looks up 32 tokens without it.
        logits_processor (`LogitsProcessorList`, *optional*): The logits processors of the call. Drafting applies those
            that keep no state. Defaults to none.
        model_kwargs (`dict`, *optional*): The keyword arguments of the target's forward. They are not kept, because
            every call of `get_candidates` passes them again, but it is checked that their cache can be rewound.
        session ([`DraftSession`], *optional*): The session that drafts. The package's own loop passes it in place of
            `logits_processor`, for a pair and a call that it has validated.

    Raises:
        ValueError: If `assistant_model` is not a drafter of this package, or does not fit the target, or if the cache
            of `model_kwargs` cannot be rewound.

    Example:
    ```python
    >>> import torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> import hf_domino
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... )).eval()
    >>> config = hf_domino.DominoConfig.for_target(target.config, num_hidden_layers=1, block_size=4, mask_token_id=3)
    >>> drafter = hf_domino.DominoDraftModel(config).eval()
    >>> ids, options = torch.tensor([[5, 9, 33]]), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    >>> plain = target.generate(ids, **options)
    >>> hf_domino.uninstall()  # from here on Transformers' own loop runs
    >>> target._get_candidate_generator = lambda **call: hf_domino.DominoCandidateGenerator(
    ...     drafter, target, call["generation_config"], call["logits_processor"], call["model_kwargs"]
    ... )
    >>> torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    True
    >>> hf_domino.install()

    ```
    """

    requires_model_outputs = True

    def __init__(
        self,
        assistant_model: DominoDraftModel,
        target_model: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        model_kwargs: dict[str, Any] | None = None,
        *,
        session: DraftSession | None = None,
    ):
        if session is None:
            drafter = fitting_drafter(assistant_model, target_model, "assistant_model")
            _check_cache(model_kwargs or {})
            target = TargetModel(target_model, drafter.config.layer_ids(target_model.config))
            stops = KnownStops(frozenset(eos_ids_of(generation_config)), generation_config.max_length)
            session = open_session(drafter, target, TokenDistribution(logits_processor or LogitsProcessorList(), stops))
        self.session = session  # drafts, and keeps the context between rounds
        drafter = session.drafter
        self.assistant_model = drafter
        self.target = session.target
        self.num_assistant_tokens = most_proposals(drafter, target_model, generation_config)
        wants_states = bool(generation_config.return_dict_in_generate and generation_config.output_hidden_states)
        self.model_kwargs_overrides = self.target.capture_kwargs(capture_all=wants_states)
        self._do_sample = bool(generation_config.do_sample)
        is_fixed = session.executor.is_fixed
        self.policy = policy_for(self, drafter, target_model, self.num_assistant_tokens, self._do_sample, is_fixed)
        self.lookup = PromptLookup.of_call(generation_config, drafter, self.target.text_config.vocab_size, is_fixed)
        # The remaining attributes serve the interface of Transformers' loop.
        self._stats = DecodingStats.of_rows(self.num_assistant_tokens, 1)
        self._plan: Plan | None = None
        self._proposals: Tree | None = None
        self._prefixes: Prefixes | None = None
        self._start = 0.0
        self._call_start = time.perf_counter()
        self._prompt_length = 0

    # --- the interface for the package's own loop -------------------------------------------------------------------

    def observe_prompt(self, captured: Sequence[torch.Tensor], length: int, mask: torch.Tensor | None = None) -> None:
        """Store the target's hidden states of the prompt.

        Args:
            captured (`Sequence[torch.Tensor]`): Hidden states of the layers that the drafter reads, `[B, C, H]` each,
                at the last C positions of the prompt.
            length (`int`): Number of positions in the prompt, including padding and positions that the target had
                cached before.
            mask (`torch.Tensor`, *optional*): Attention mask `[B, length]`, which is 0 at padding.
        """
        self.session.observe(tuple(captured), length, mask)

    def plan(
        self, prefixes: Prefixes, positions_left: int | None = None, may_branch: Callable[[], bool] = bool
    ) -> Plan:
        """Choose what the next round proposes: nothing, a chain, a tree, or tokens from prompt lookup.

        Args:
            prefixes ([`Prefixes`]): The tokens so far of the B sequences.
            positions_left (`int`, *optional*): How many positions the target has left for proposals; None for no limit.
            may_branch (`Callable`, *optional*): Returns whether the target can verify trees. It is called only when the
                policy wants one. Defaults to a function that returns `False`.
        """
        num_rows = len(prefixes.rows)
        room = self._room(max(prefixes.lengths), positions_left)
        offer = None
        if self.lookup.most:
            offer = self.lookup.offer(prefixes, room, self.policy.price(num_rows))
        return self.policy.plan(num_rows, min(room, self.num_assistant_tokens), offer, may_branch)

    def propose(self, plan: Plan, prefixes: Prefixes, noise: torch.Tensor | None = None) -> Tree:
        """Make a round's proposals.

        Args:
            plan ([`Plan`]): The plan that [`~DominoCandidateGenerator.plan`] made for this round.
            prefixes ([`Prefixes`]): The tokens so far of the B sequences.
            noise (`torch.Tensor`, *optional*): Exponential noise `[B, P + 1, V]` to sample drafts with. Without it, the
                most likely tokens are drafted.

        Returns:
            [`Tree`]: The proposed tokens `[B, N]` and their parents. A chain is also represented as a tree.
        """
        if plan.offer is not None:
            return Tree(self.lookup.proposals(plan.offer, prefixes))
        return self.session.propose(prefixes, plan.length, noise, plan.arm.tree_size, plan.least_chance)

    def observe_round(self, outcome: Outcome, seconds: float) -> None:
        """Record how many tokens a round emitted and how long it took, so that later plans can use it."""
        if outcome.plan.offer is not None:
            self.lookup.observe(outcome.plan.offer, outcome.num_emitted)
        self.policy.observe(outcome, seconds)

    def _room(self, length: int, positions_left: int | None) -> int:
        """The largest number of proposals after a sequence of this length."""
        # A draft may extend past the length limit, and prompt lookup may extend past it no further than a draft does.
        most = max(self.num_assistant_tokens, self.lookup.most)
        wanted = self.session.distribution.stops.room(length)
        if wanted is not None:
            most = min(most, max(wanted, self.assistant_model.config.num_draft_tokens))
        if positions_left is None:
            return most
        return min(most, max(positions_left, 0))

    # --- the interface for Transformers' assisted loop --------------------------------------------------------------

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Propose candidates that continue one sequence, as Transformers' assisted loop requests them.

        Args:
            input_ids (`torch.LongTensor`): The tokens so far, `[1, T]`.
            model_kwargs (`dict`, *optional*): The target's keyword arguments. Only the attention mask is used.
            model_outputs (`ModelOutput`, *optional*): Outputs of the target's last forward, including the hidden states
                that `model_kwargs_overrides` requested.
            is_first_iteration (`bool`, *optional*, defaults to `False`): Whether the target has not run a forward yet.
                In that case there are no hidden states to draft from, so no candidates are proposed.
            n_last_matches (`int`, *optional*, defaults to 0): How many candidates of the last round were accepted.

        Returns:
            `tuple`: The tokens so far followed by P candidates, `[1, T + P]`, and None in place of candidate logits.
            Because of the None, the loop accepts exactly those candidates that equal the target's own choice, so the
            output is exact for greedy and for sampled generation.

        Raises:
            ValueError: If there is more than one sequence.
        """
        if len(input_ids) != 1:
            remedy = "Call model.generate(..., assistant_model=drafter), whose loop handles batches."
            raise invalid_argument("the batch size of get_candidates", 1, len(input_ids), remedy)
        if is_first_iteration or model_outputs is None:
            self._begin(input_ids, model_kwargs or {})
            return input_ids, None
        self._start = time.perf_counter()
        self._observe_outputs(input_ids, model_kwargs or {}, model_outputs, int(n_last_matches))
        self._show(input_ids)
        self._prefixes = Prefixes.of(input_ids)
        self._plan = self.plan(self._prefixes, self._positions_left(input_ids.shape[1]))
        noise = None
        if self._do_sample:
            noise = self._upcoming_noise(self._plan, model_outputs.logits)
        self._proposals = self.propose(self._plan, self._prefixes, noise)
        self._plan = self._plan.followed_with(self._proposals.num_nodes)
        tokens = self._proposals.tokens.to(input_ids.device)
        return torch.cat((input_ids, tokens), dim=1), None  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Record how many candidates the target accepted, for the next rounds and for `drafter.stats`.

        Args:
            input_ids (`torch.LongTensor`): The tokens so far, `[1, T]`, including the accepted candidates and the bonus
                token.
            scores (`torch.FloatTensor`): The target's processed scores `[1, P + 1, V]`. They are not used.
            num_matches (`int`): How many candidates were accepted.
        """
        self._stats.num_new_tokens = input_ids.shape[1] - self._prompt_length
        self._stats.seconds = time.perf_counter() - self._call_start
        record_stats(self.assistant_model, self._stats)
        self._show(input_ids)
        self.lookup.finish(1)
        if self._plan is None or self._proposals is None:
            return
        outcome = Outcome(self._plan, ONE_SEQUENCE, self._proposals.num_nodes, [int(num_matches) + 1])
        outcome.add_to(self._stats)
        self.observe_round(outcome, time.perf_counter() - self._start)

    def _show(self, input_ids: torch.Tensor) -> None:
        """Let prompt lookup and the session read the tokens so far, `[1, T]`."""
        self.lookup.read = self.session.read = lambda row, start: input_ids[row, start:].tolist()

    def _begin(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> None:
        """Record the length of the prompt, its padding and the start time, before the first forward."""
        if not input_ids.shape[1]:
            remedy = "Call model.generate(..., assistant_model=drafter) with the patch, whose loop takes them."
            raise invalid_argument("the prompt of get_candidates", "of token ids", "of embeddings alone", remedy)
        self._call_start = time.perf_counter()
        self._prompt_length = input_ids.shape[1]
        if self.lookup.most:
            self.lookup.padding = num_padding(input_ids, model_kwargs.get("attention_mask"))

    def _positions_left(self, length: int) -> int | None:
        """How many proposals have room after a text of this length in the target and in the loop's cache."""
        # Unlike the caches of the package's own loop, a static cache of Transformers ends where the text does.
        left = [self.session.distribution.stops.room(length)]
        if (limit := self.target.position_limit) is not None:
            left.append(limit - length)
        return min((count for count in left if count is not None), default=None)

    @staticmethod
    def _upcoming_noise(plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        """Compute the exponential noise `[1, P + 1, V]` that the loop's `torch.multinomial` is about to draw with.

        Drafts that are sampled with this noise are accepted more often. If the loop draws other noise, generation is
        slower, but the output is still correct.
        """
        devices = [logits.device] if logits.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            shape = (plan.length + 1, logits.shape[2])
            noise = torch.empty(shape, dtype=torch.float32, device=logits.device).exponential_()
        return noise[None]

    def _observe_outputs(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], outputs: ModelOutput, num_matches: int
    ) -> None:
        """Store the hidden states of the target's last forward, which processed the prompt or verified a block."""
        captured = self.target.captured(outputs)
        if self._proposals is None or self._prefixes is None:
            length = input_ids.shape[1] - 1
            mask = model_kwargs.get("attention_mask")
            if mask is not None:
                mask = mask[:, :length]
            self.observe_prompt(captured, length, mask)
            return
        width = self._proposals.num_nodes + 1
        self.session.learn(self._prefixes, self._proposals, outputs.logits[:, -width:])
        self.session.observe_block(captured, [num_matches + 1])


def _check_cache(model_kwargs: dict[str, Any]) -> None:
    """Raise an error for a cache that Transformers' loop could not rewind."""
    cache = model_kwargs.get(CACHE)
    if cache is not None and (kind := unrewindable(cache)):
        remedy = "It cannot be rewound after a rejection, as windows of a static cache cannot; "
        remedy += "leave cache_implementation unset."
        raise invalid_argument(f"the layers of {CACHE}", "ones that drop their last positions", kind, remedy)

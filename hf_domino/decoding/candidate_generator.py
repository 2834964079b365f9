"""`DominoCandidateGenerator`: proposes the tokens of every round, by the drafter, as a tree, or by prompt lookup.

It subclasses Transformers' `CandidateGenerator`. Two loops drive it. The package's own loop (`decoding/loop.py`) uses
the wider form, for batches and trees: `observe_prompt`, then `plan`, `propose`, `learn`, `observe_block` and
`observe_round` in each round. Transformers' assisted loop uses the narrow form, for one sequence and chains of
proposals: `get_candidates` and `update_candidate_strategy`. Both forms share all of the drafting.

Shapes: B sequences still generated, T tokens so far, P proposals, C context positions, N nodes, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.from_target import ends_of
from hf_domino.decoding.drafting import DraftSession, GrowingDraftSession
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.policy import most_proposals, policy_for
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.prompt_lookup import PromptLookup
from hf_domino.decoding.recycling import RecyclingSession
from hf_domino.decoding.round import Outcome, Plan
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.static.drafting import StaticDraftSession
from hf_domino.decoding.static.workspace import Workspace
from hf_domino.decoding.stopping import KnownStops
from hf_domino.decoding.tree import Tree
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache
from hf_domino.statistics.stats import DecodingStats, record_stats
from hf_domino.target.compatibility import fitting_drafter
from hf_domino.target.view import TargetModel

ONE_SEQUENCE = [0]


class DominoCandidateGenerator(CandidateGenerator):
    """Propose candidate tokens for assisted generation with a [`DominoDraftModel`].

    `model.generate(..., assistant_model=drafter)` makes one for each call, so you only need this class to drive a loop
    of your own, or Transformers' own assisted loop without the patch that `import hf_domino` installs. Return it from
    the target's `_get_candidate_generator`, as the example shows. That loop handles one sequence at a time. Its greedy
    output equals plain `generate`; its sampled output has the same distribution, but not the same text for a seed.

    Args:
        assistant_model ([`DominoDraftModel`]): The drafter, of any method, [`recycling`] included.
        target_model (`PreTrainedModel`): The model that generates.
        generation_config (`GenerationConfig`): The merged configuration of the call. `num_assistant_tokens` limits the
            proposals of a round, `prompt_lookup_num_tokens` lets rounds propose tokens that followed earlier matches.
        logits_processor (`LogitsProcessorList`, *optional*): The processors of the call, which drafts follow as far as
            they keep no state. Defaults to none.
        model_kwargs (`dict`, *optional*): The keyword arguments of the target's forward. They are not kept: every call
            of `get_candidates` passes them again.
        distribution ([`TokenDistribution`], *optional*): Given by the package's own loop, in place of
            `logits_processor`, with the stopping criteria of the call.
        executor ([`Executor`], *optional*): Given by that loop: calls the functions of a round, or captures them.

    Raises:
        ValueError: If `assistant_model` is not a drafter of this package, or does not fit the target.

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
        distribution: TokenDistribution | None = None,
        executor: Executor | None = None,
    ):
        drafter: DominoDraftModel = fitting_drafter(assistant_model, target_model, "assistant_model")
        self.assistant_model = drafter
        self.target = TargetModel(target_model, drafter.config.layer_ids(target_model.config))
        self.num_assistant_tokens = most_proposals(drafter, target_model, generation_config)
        wants_states = bool(generation_config.return_dict_in_generate and generation_config.output_hidden_states)
        self.model_kwargs_overrides = self.target.capture_kwargs(capture_all=wants_states)
        self.executor = executor or Executor()
        if distribution is None:
            stops = KnownStops(frozenset(ends_of(generation_config)), generation_config.max_length)
            distribution = TokenDistribution(logits_processor or LogitsProcessorList(), stops)
        self.distribution = distribution.without_state()
        self._do_sample = bool(generation_config.do_sample)
        self.policy = policy_for(
            drafter, target_model, self.num_assistant_tokens, self._do_sample, self.executor.is_fixed
        )
        self.lookup = PromptLookup.of_call(generation_config, drafter.config)
        self._session = self._new_session()
        # What Transformers' loop is told round by round.
        self._stats = DecodingStats.of_rows(self.num_assistant_tokens, 1)
        self._plan: Plan | None = None
        self._proposals: Tree | None = None
        self._prefixes: Prefixes | None = None
        self._start = 0.0
        self._call_start = time.perf_counter()
        self._prompt_length = 0

    # --- the form that the package's own loop drives ----------------------------------------------------------------

    def continue_from(self, context: ContextCache | None) -> None:
        """Go on from the drafter's context of an earlier call, where rounds have no fixed shape."""
        self._session = self._new_session(context)

    def observe_prompt(self, captured: Sequence[torch.Tensor], length: int, mask: torch.Tensor | None = None) -> None:
        """Store the target's hidden states of the prompt.

        Args:
            captured (`Sequence[torch.Tensor]`): The layers that the drafter reads, `[B, C, H]` each, of the last C
                positions of the prompt.
            length (`int`): Positions of the prompt, padding and those cached before included.
            mask (`torch.Tensor`, *optional*): Attention mask `[B, length]`, 0 where a sequence is padded.
        """
        self._session.observe(tuple(captured), length, mask)

    def observe_block(self, captured: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """Store the hidden states `[B, W, H]` of a verified block, of each sequence the first `counts` positions."""
        self._session.observe_block(tuple(captured), counts)

    def plan(
        self, prefixes: Prefixes, positions_left: int | None = None, may_branch: Callable[[], bool] = bool
    ) -> Plan:
        """Choose what the next round proposes: nothing, a chain, a tree, or tokens that prompt lookup found.

        Args:
            prefixes ([`Prefixes`]): The tokens so far of the B sequences.
            positions_left (`int`, *optional*): Positions that the target has for proposals; None for no limit.
            may_branch (`Callable`, *optional*): Asked when a tree is wanted: whether the target can verify one.
                Defaults to never.
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
            plan ([`Plan`]): What [`~DominoCandidateGenerator.plan`] chose for it.
            prefixes ([`Prefixes`]): The tokens so far of the B sequences.
            noise (`torch.Tensor`, *optional*): Exponential noise `[B, P + 1, V]` that drafts are sampled with; None for
                the likeliest tokens.

        Returns:
            [`Tree`]: Tokens `[B, N]` and their parents; a chain is a tree, too.
        """
        if plan.offer is not None:
            return Tree(self.lookup.proposals(plan.offer, prefixes))
        return self._session.propose(prefixes, plan.length, noise, plan.arm.tree_size, plan.least_chance)

    def learn(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> None:
        """Let a drafter that learns while it generates see the target's logits `[B, N + 1, V]` of a verified block."""
        self._session.learn(prefixes, proposals, logits)

    def observe_round(self, outcome: Outcome, seconds: float) -> None:
        """Learn how many tokens a round emitted in how much time, for the choice of the next ones."""
        self.lookup.observe(outcome)
        self.policy.observe(outcome, seconds)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the B sequences only, in this order."""
        self._session.select(rows)

    def context(self) -> ContextCache | None:
        """The keys and values of all context so far, for a later call; None where the method keeps none."""
        return self._session.context()

    @property
    def session(self) -> DraftSession:
        """What drafts, and keeps the context between rounds."""
        return self._session

    def _new_session(self, context: ContextCache | None = None) -> DraftSession:
        drafter = self.assistant_model
        target = self.target
        if isinstance(self.executor, Workspace):
            return StaticDraftSession(drafter, target, self.distribution, self.executor)
        if drafter.config.learns_while_drafting:
            return RecyclingSession(drafter, target, self.distribution, self.executor)
        return GrowingDraftSession(drafter, target, self.distribution, self.executor, context=context)

    def _room(self, length: int, positions_left: int | None) -> int:
        """Most proposals behind sequences of this length; prompt lookup goes no further past the end than a draft."""
        most = max(self.num_assistant_tokens, self.lookup.most)
        wanted = self.distribution.stops.room(length)
        if wanted is not None:
            most = min(most, max(wanted, self.assistant_model.config.num_draft_tokens))
        if positions_left is None:
            return most
        return min(most, max(positions_left, 0))

    # --- the form that Transformers' assisted loop drives -----------------------------------------------------------

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Propose candidates behind one sequence, as Transformers' assisted loop asks for them.

        Args:
            input_ids (`torch.LongTensor`): The tokens so far, `[1, T]`.
            model_kwargs (`dict`, *optional*): The target's keyword arguments, of which the attention mask is read.
            model_outputs (`ModelOutput`, *optional*): Outputs of the target's last forward, with the hidden states that
                `model_kwargs_overrides` asked for.
            is_first_iteration (`bool`, *optional*, defaults to `False`): Whether no forward was run yet. There are no
                hidden states to draft from then, so there are no candidates.
            n_last_matches (`int`, *optional*, defaults to 0): Candidates that the last forward accepted.

        Returns:
            `tuple`: The tokens so far with P candidates behind them, `[1, T + P]`, and None: the loop then keeps the
            candidates that are the target's own choice, which is exact for greedy and for sampled generation.

        Raises:
            ValueError: If there is more than one sequence.
        """
        if len(input_ids) != 1:
            remedy = "Call model.generate(..., assistant_model=drafter), whose loop handles batches."
            raise invalid_argument("the batch size of get_candidates", 1, len(input_ids), remedy)
        if is_first_iteration or model_outputs is None:
            self._begin(input_ids)
            return input_ids, None
        self._start = time.perf_counter()
        self._observe_outputs(input_ids, model_kwargs or {}, model_outputs, int(n_last_matches))
        self.lookup.read = lambda row, start: input_ids[row, start:].tolist()
        self._prefixes = Prefixes.of(input_ids)
        positions_left = self.target.position_limit
        if positions_left is not None:
            positions_left -= input_ids.shape[1]
        self._plan = self.plan(self._prefixes, positions_left)
        noise = None
        if self._do_sample:
            noise = self._upcoming_noise(self._plan, model_outputs.logits)
        self._proposals = self.propose(self._plan, self._prefixes, noise)
        tokens = self._proposals.tokens.to(input_ids.device)
        return torch.cat((input_ids, tokens), dim=1), None  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Learn how many candidates the target accepted, for the next rounds and for `drafter.stats`.

        Args:
            input_ids (`torch.LongTensor`): The tokens so far, the accepted ones and the bonus token included, `[1, T]`.
            scores (`torch.FloatTensor`): The target's processed scores `[1, P + 1, V]`; they are not read.
            num_matches (`int`): How many candidates were accepted.
        """
        self._stats.num_new_tokens = input_ids.shape[1] - self._prompt_length
        self._stats.seconds = time.perf_counter() - self._call_start
        record_stats(self.assistant_model, self._stats)
        if self._plan is None or self._proposals is None:
            return
        outcome = Outcome(self._plan, ONE_SEQUENCE, self._proposals.num_nodes, [int(num_matches) + 1])
        outcome.add_to(self._stats)
        self.observe_round(outcome, time.perf_counter() - self._start)

    def _begin(self, input_ids: torch.LongTensor) -> None:
        """Note where the prompt ends, before the first forward."""
        if not input_ids.shape[1]:
            remedy = "Call model.generate(..., assistant_model=drafter) with the patch, whose loop takes them."
            raise invalid_argument("the prompt of get_candidates", "of token ids", "of embeddings alone", remedy)
        self._call_start = time.perf_counter()
        self._prompt_length = input_ids.shape[1]

    @staticmethod
    def _upcoming_noise(plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        """Look ahead at the exponential noise `[1, P + 1, V]` that the loop's `torch.multinomial` will draw with.

        Drafts that are sampled with it are accepted more often. Whether it is the same only matters for speed.
        """
        devices = [logits.device] if logits.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            shape = (plan.length + 1, logits.shape[2])
            noise = torch.empty(shape, dtype=torch.float32, device=logits.device).exponential_()
        return noise[None]

    def _observe_outputs(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], outputs: ModelOutput, num_matches: int
    ) -> None:
        """Store the hidden states of the forward that came last: the prompt's, or those of a verified block."""
        captured = self.target.captured(outputs)
        if self._proposals is None or self._prefixes is None:
            length = input_ids.shape[1] - 1
            mask = model_kwargs.get("attention_mask")
            if mask is not None:
                mask = mask[:, :length]
            self.observe_prompt(captured, length, mask)
            return
        width = self._proposals.num_nodes + 1
        self.learn(self._prefixes, self._proposals, outputs.logits[:, -width:])
        self.observe_block(captured, [num_matches + 1])

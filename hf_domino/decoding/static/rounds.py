"""Rounds of fixed shape, for `cache_implementation="static"`: the parts of the loop as stages that can be captured.

The loop is the one of `loop.py`; its target runner, draft session and judge are replaced by ones that run the same
functions as stages of fixed-shape tensors: backbone, rollout, verification forward, acceptance. On a GPU each stage is
a graph, launched as one. What looks at a prefix, which grows, is no stage and runs between them.

Shapes: P proposals, W positions of a verification forward, K block size, H hidden size, L captured layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from hf_domino.decoding.caches.alignment import PER_POSITION
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.noise.steps import DraftNoise, OwnNoise
from hf_domino.decoding.pacing.blocks import fitting_length
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors.stock import CHECKS_LAW, PREFIX_FREE
from hf_domino.decoding.rollout import Listener, rollout
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.compiling import CompileOptions
from hf_domino.decoding.static.workspace import Workspace, give_back, take_workspace
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.verification import Judgement, judge
from hf_domino.drafter.context import ContextCache
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.stats import PhaseTimer
from hf_domino.target.view import TargetModel


def law_key(law: TokenLaw) -> Hashable | None:
    """What a law is made of, if it can be part of a stage; None if it looks at a prefix or at a result."""
    parts: list[Hashable] = []
    for processor in law.processors:
        if type(processor) not in PREFIX_FREE or type(processor) in CHECKS_LAW:  # which reads a result back
            return None
        parts.append((type(processor), *sorted(vars(processor).items())))
    return tuple(parts)


def fitting_width(num_drafted: int, most: int) -> int:
    """Positions of the verification forward for `num_drafted` proposals: one of a few widths, so that few are captured.

    Args:
        num_drafted (`int`): Proposals to check, at most `most`.
        most (`int`): Proposals of a full round.
    """
    return 1 + fitting_length(num_drafted, most)


def make_static(
    input_ids: torch.Tensor,
    runner: TargetRunner,
    session: DraftSession,
    law: TokenLaw,
    config: GenerationConfig,
    compiling: CompileOptions | None = None,
) -> tuple[StaticRunner, StaticDraftSession, StaticJudge]:
    """The parts of the loop with fixed shapes, in place of those that grow.

    Args:
        input_ids (`torch.Tensor`): The prompt `[1, T]`.
        runner ([`TargetRunner`]): What would run the target; its cache is a static one that is still empty.
        session ([`DraftSession`]): What would draft.
        law ([`TokenLaw`]): The target's, and where texts end.
        config (`GenerationConfig`): For `max_cache_len`, and for whether the cache is returned.
        compiling ([`CompileOptions`], *optional*): What stages are compiled with.
    """
    target, drafter, embeds = runner.target, session.drafter, runner.kwargs.get("inputs_embeds")
    num_embeds = 0 if embeds is None else embeds.shape[1] - input_ids.shape[1]
    most = drafter.config.num_draft_tokens
    limit = law.stops.max_length
    assert limit is not None, "generate always has a length limit, its own or the caller's"
    longest = max(limit, getattr(config, "max_cache_len", None) or 0) + max(num_embeds, 0)
    # The last block may begin at the last position and be rejected as a whole.
    workspace = take_workspace(target.model, drafter, runner.cache, longest + most + 1, input_ids.device)
    workspace.graphs.compiler.options = compiling
    return (
        StaticRunner(target, session, runner.kwargs, workspace, bool(config.return_dict_in_generate)),
        StaticDraftSession(drafter, target, session.law, session.timer, workspace),
        StaticJudge(law, workspace),
    )


class StaticRunner(TargetRunner):
    """Runs the target on a cache of fixed shape; a round moves the cache's length and nothing else.

    Args:
        target ([`TargetModel`]): View of the target.
        session ([`DraftSession`]): For its drafter, whose workspace it is, and its timer.
        model_kwargs (`dict`): What `generate` prepared.
        workspace ([`Workspace`]): Cache and graphs.
        is_returned (`bool`): Whether the caller gets the cache: then it is a copy that grows.
    """

    def __init__(
        self,
        target: TargetModel,
        session: DraftSession,
        model_kwargs: dict[str, Any],
        workspace: Workspace,
        is_returned: bool = False,
    ):
        super().__init__(target, model_kwargs | {"past_key_values": workspace.cache}, timer=session.timer)
        self._drafter, self._workspace, self._is_returned = session.drafter, workspace, is_returned
        self._most = session.drafter.config.num_draft_tokens
        self._length = 0  # of the cache, as its device knows it
        self._next_position = 0
        self._tensors: dict[str, torch.Tensor] = {}  # what every verification forward reads beside its block
        self._options: dict[str, Any] = {}
        self._key: Hashable = None

    def begin(self, rows: Sequence[int]) -> None:
        """Put what all rounds read where it stays."""
        kwargs, hold = self.kwargs, self._workspace.hold
        mask = torch.ones(1, self._workspace.capacity, dtype=torch.long, device=self._device)
        given = self.mask(self._length)
        if given is not None:
            mask[:, : self._length] = given
        self._tensors = {"attention_mask": hold("attention_mask", mask)}
        if (positions := kwargs.get("position_ids")) is not None:
            offset = positions[..., -1:] + 1 - self._length
            self._tensors["position_ids"] = hold("position_ids", offset)
            self._next_position = int(positions.max()) + 1
        else:
            self._next_position = self._length
        if (types := kwargs.get("token_type_ids")) is not None:
            self._tensors["token_type_ids"] = hold("token_type_ids", types[..., -1:])
        if (types := kwargs.get("mm_token_type_ids")) is not None:
            self._tensors["mm_token_type_ids"] = hold("mm_token_type_ids", torch.zeros_like(types[..., -1:]))
        taken = (*PER_POSITION, "past_key_values", "inputs_embeds")
        self._options = {
            name: hold(f"option {name}", value) if isinstance(value, torch.Tensor) else value
            for name, value in kwargs.items()
            if name not in taken
        }
        names = [(name, "" if isinstance(v, torch.Tensor) else repr(v)) for name, v in self._options.items()]
        self._key = ("verify", *sorted(self._tensors), *sorted(names))

    def next_position(self) -> int:
        """The position of the next anchor."""
        return self._next_position

    def check_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Verification forward over the anchor `[1, 1]` and proposals `[1, P]`, filled up to one of a few widths.

        Returns:
            `tuple`: Logits `[1, P + 1, V]` and captured hidden states `[1, W, H]`.
        """
        num_checked = proposed.num_nodes + 1
        width = fitting_width(proposed.num_nodes, self._most)
        block = torch.nn.functional.pad(torch.cat((anchors, proposed.tokens), dim=1), (0, width - num_checked))
        with self._timer.phase("target_forward"):
            logits, *captured = self._workspace.graphs(self._key, self._verify, block)
        return logits[:, :num_checked], tuple(captured)

    def _verify(self, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The forward over the block `[1, W]`: logits and captured hidden states. Writes behind the cache's length."""
        width = block.shape[1]
        kwargs = self._options | {"attention_mask": self._tensors["attention_mask"]}
        if (offset := self._tensors.get("position_ids")) is not None:
            positions = offset + self.cache.length + torch.arange(width, device=block.device)
            if (limit := self.target.position_limit) is not None:  # of what only fills up
                positions = positions.clamp_max(limit - 1)
            kwargs["position_ids"] = positions
        for name in ("token_type_ids", "mm_token_type_ids"):
            if (types := self._tensors.get(name)) is not None:
                kwargs[name] = types.expand(*types.shape[:-1], width)
        inputs = self.model.prepare_inputs_for_generation(
            block, next_sequence_length=width, past_key_values=self.cache, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        outputs = self.model(**(inputs | self._forward_kwargs))
        return (outputs.logits[:, -width:], *self.target.captured(outputs))

    def commit(self, counts: Sequence[int], num_checked: int, rows: Sequence[int]) -> None:
        """Keep the committed tokens in the cache: what is behind them is not there."""
        self._next_position += counts[0]
        self._move_to(self._length + counts[0])

    def end(self, batch_size: int) -> None:
        """Leave a cache that the caller can go on from, if it gets one."""
        if self._is_returned:
            config = self.model.config.get_text_config(decoder=True)
            self.kwargs["past_key_values"] = self._workspace.cache.to_dynamic(config)

    def release(self) -> None:
        """Leave the workspace to the next call."""
        give_back(self.model, self._drafter, self._workspace)

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """A forward over the prompt, or part of it."""
        logits, captured = super()._forward(*args, **kwargs)
        self._move_to(self._length + captured[0].shape[1])
        return logits, captured

    def _move_to(self, length: int) -> None:
        self._length = length
        self._workspace.cache.length.fill_(length)


class StaticDraftSession(DraftSession):
    """Drafts from a context of fixed shape.

    Args:
        drafter ([`DominoDraftModel`]): The drafter; not changed.
        target ([`TargetModel`]): View of the target.
        law ([`TokenLaw`]): What drafts are chosen from.
        timer ([`PhaseTimer`]): Times the stages.
        workspace ([`Workspace`]): Context and graphs.
    """

    def __init__(
        self, drafter: DominoDraftModel, target: TargetModel, law: TokenLaw, timer: PhaseTimer, workspace: Workspace
    ):
        super().__init__(drafter, target, law, timer)
        self._fixed, self._graphs = workspace.context, workspace.graphs
        self._law_key = law_key(law)
        # [1, C, L * H], hidden states of positions that no drafted block has put into the context.
        self._pending: torch.Tensor | None = None

    def _take(self, captured: tuple[torch.Tensor, ...], position_ids: torch.Tensor, counts: list[int]) -> None:
        """Store the prompt, whatever its length."""
        self._fixed.announce(counts[0])
        self._backbone(position_ids[:, :0], self._joined(captured))

    def observe_block(self, captured: tuple[torch.Tensor, ...], counts: Sequence[int]) -> None:
        """Take the hidden states `[1, W, H]` of a verified block; the committed ones, the first, are valid."""
        self._store()
        self._pending = self._joined(captured)  # a copy: the next verification writes over them
        self._fixed.announce(counts[0])

    def _joined(self, captured: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat([states.to(self.drafter.device) for states in captured], dim=-1)

    def _store(self) -> None:
        """Put into the context what no drafted block has put there."""
        if self._pending is not None:
            no_block = self._pending.new_zeros(1, 0, dtype=torch.long)
            with self.timer.phase("draft"):
                self._graphs("backbone", self._backbone, no_block, self._pending)

    def context(self) -> ContextCache:
        """A copy of all context observed so far."""
        self._store()
        return self._fixed.to_dynamic()

    def _run_backbone(self, block: torch.Tensor) -> torch.Tensor:
        """Draft hidden states `[1, K, H]` of the block `[1, K]`; stores the new context."""
        pending = self._pending
        if pending is None:  # stored already: positions of which none is valid stand for it
            size = len(self.drafter.config.target_layer_ids) * self.drafter.config.hidden_size
            width = self.drafter.config.num_draft_tokens + 1
            pending = torch.zeros(1, width, size, dtype=self.target.model.dtype, device=self.drafter.device)
            self._fixed.announce(0)
        self._pending = None
        return self._graphs("backbone", self._backbone, block, pending)[0]

    def _backbone(self, block: torch.Tensor, pending: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device, context = self.drafter.device, self._fixed
        draft_hidden = self.drafter(
            self.target.embed(block).to(device),
            (context.length + torch.arange(block.shape[1], device=device))[None],
            self.drafter.fuse_context([pending]),
            (context.start + torch.arange(pending.shape[1], device=device))[None],
            cache=context,
        )
        return (draft_hidden,)

    def _choose(
        self, draft_hidden: torch.Tensor, prefixes: Prefixes, noise: DraftNoise | None, goes_on: Listener | None
    ) -> torch.Tensor:
        # What is told of every proposal is on the host; noise of its own comes with that.
        if self._law_key is None or goes_on is not None or isinstance(noise, OwnNoise):
            return super()._choose(draft_hidden, prefixes, noise, goes_on)
        inputs = (draft_hidden, prefixes.last()) + (() if noise is None else (noise,))
        return self._graphs(("rollout", self._law_key), self._rollout, *inputs)[0]

    def _rollout(
        self, draft_hidden: torch.Tensor, anchors: torch.Tensor, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        # A law that is part of a stage looks at no token before the anchor.
        prefixes = Prefixes.of(anchors)
        return (rollout(self.drafter, self.target, draft_hidden, prefixes, self.law, noise, is_fixed=True),)


class StaticJudge:
    """Accepts proposals as a stage, where the law can be part of one.

    Args:
        law ([`TokenLaw`]): The target's.
        workspace ([`Workspace`]): Its graphs.
    """

    def __init__(self, law: TokenLaw, workspace: Workspace):
        self.law, self._graphs = law, workspace.graphs
        self._key = law_key(law)

    def __call__(
        self,
        law: TokenLaw,
        prefixes: Prefixes,
        proposals: Tree,
        logits: torch.Tensor,
        noise: torch.Tensor | None,
    ) -> Judgement:
        """See [`~hf_domino.decoding.verification.judge`]."""
        if self._key is None:
            return judge(law, prefixes, proposals, logits, noise)
        inputs = (logits, proposals.tokens) + (() if noise is None else (noise,))
        scores, outcome = self._graphs(("judge", self._key), self._judge, *inputs)
        return Judgement(scores, outcome)

    def _judge(
        self, logits: torch.Tensor, proposals: torch.Tensor, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        judgement = judge(self.law, Prefixes.of(proposals), Tree(proposals), logits, noise)
        return judgement.scores, judgement.outcome

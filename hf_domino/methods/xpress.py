"""XPress: a causal mixer corrects a full block at once, in a few passes (arXiv 2608.02438).

Let h_k be the draft hidden states of a block, g their mean, and e_k the embedding of the token before position k.

    x_k = W [down_h h_k ; down_g g ; e_k]
    c_k = x_k + sum over j <= k of L[k, j] x_j, with a separate matrix L for each dimension
    corrected_k = base_k + readout(c_k + MLP(c_k))

Tokens enter only through W and L, which are linear. So the contribution of the draft hidden states to c is computed
once per block and appended to them, and a state adds the contribution of the tokens. A chain is first chosen from the
base logits, then chosen again `num_jacobi_passes` times, each time given the tokens of the previous pass. After k
passes, the first k tokens are the ones that token-by-token drafting would choose. Trees are grown token by token. If
the anchor's position makes no proposal, the anchor also serves as the token before itself, as in vLLM. Tensors have the
names that speculators uses (`refiner_head.*`).

Shapes: N sequences or branches, T tokens, H hidden size, R rank, K block size, P proposals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn

from hf_domino.configuration.checks import WIDTH, check_range
from hf_domino.configuration.from_target import rank_for
from hf_domino.methods.backbone import ZeroLinear
from hf_domino.methods.block import BlockModel
from hf_domino.methods.block_config import BlockConfig
from hf_domino.methods.correction import CorrectionHead, partial_product

if TYPE_CHECKING:
    from hf_domino.targets.view import TargetModel

MOST_POSITIONS = 256  # largest block size: states count tokens in their own dtype, and bfloat16 is exact only up to 256


@strict
class XPressConfig(BlockConfig):
    """Configuration of an XPress drafter.

    Args:
        xpress_rank (`int`, *optional*, defaults to 256): Rank of the head.
        xpress_mlp_ratio (`int`, *optional*, defaults to 2): Width of its MLP, as a multiple of the rank.
        num_jacobi_passes (`int`, *optional*, defaults to 6): How often a chain is chosen again, each time given the
            tokens of the previous pass.
        kwargs: The fields of [`BlockConfig`].
    """

    projector_type: str = "xpress"
    xpress_rank: int = 256
    xpress_mlp_ratio: int = 2
    num_jacobi_passes: int = 6

    title = "XPress"
    article = "an"
    head_layers = {
        f"refiner_head.{name}": "weight"
        for name in ("token_embed", "down_h", "down_g", "in_proj", "mlp_gate", "mlp_up", "mlp_down", "readout")
    }
    fixed = {"pure_draft_prefix_len": 0}
    ranges = BlockConfig.ranges | {"xpress_rank": WIDTH, "xpress_mlp_ratio": (1, 64), "num_jacobi_passes": (1, 1024)}
    lacks = {"export": "No released engine runs XPress."}

    @classmethod
    def sizes_for(cls, hidden_size: int) -> dict[str, int]:
        return super().sizes_for(hidden_size) | {"xpress_rank": rank_for(hidden_size)}

    def check(self) -> None:
        super().check()
        check_range("block_size of an XPress drafter", self.block_size, 2, MOST_POSITIONS)


class RefinerHead(nn.Module):
    """The modules of the head."""

    def __init__(self, config: XPressConfig):
        super().__init__()
        rank = config.xpress_rank
        width = config.xpress_mlp_ratio * rank
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, config.block_size, config.block_size))
        self.mlp_gate = nn.Linear(rank, width, bias=False)
        self.mlp_up = nn.Linear(rank, width, bias=False)
        self.mlp_down = nn.Linear(width, rank, bias=False)
        self.readout = ZeroLinear(rank, config.draft_width, bias=False)

    def mixer(self) -> torch.Tensor:
        """The weight of each x_j in each c_k, `[R, K, K]`."""
        return self.mix_l.tril() + torch.eye(self.mix_l.shape[-1], device=self.mix_l.device, dtype=self.mix_l.dtype)

    def summarise(self, block: torch.Tensor) -> torch.Tensor:
        """Compute the contribution of full blocks' draft hidden states `[..., K, H]` to c, `[..., K, R]`."""
        own = self.down_h(block)
        shared = self.down_g(block.mean(dim=-2, keepdim=True)).expand_as(own)
        read = partial_product(self.in_proj, torch.cat((own, shared), dim=-1))
        size = block.shape[-2]
        return torch.einsum("rkj,...jr->...kr", self.mixer()[:, :size, :size].to(read), read)


class XPressModel(BlockModel, CorrectionHead):
    """An XPress drafter: DFlash's backbone, and a head that corrects a block in passes.

    Each draft hidden state is followed by the contribution of its block to c: `[..., H + R]`.
    """

    config_class = XPressConfig
    config: XPressConfig
    refiner_head: RefinerHead

    def build(self) -> None:
        super().build()
        self.refiner_head = RefinerHead(self.config)

    @property
    def head(self) -> CorrectionHead:
        return self

    @property
    def state_size(self) -> int:  # type: ignore[override]
        """Width of a state: the tokens' contribution to c, each token's contribution to x, and the number of tokens."""
        return (self.config.num_draft_tokens + 1) * self.config.xpress_rank + 1

    @property
    def num_passes(self) -> int:  # type: ignore[override]
        """How often a chain is chosen again."""
        return self.config.num_jacobi_passes

    @property
    def up(self) -> nn.Linear:
        return self.refiner_head.readout

    def head_parameters(self) -> list[nn.Parameter]:
        head = self.refiner_head
        layers = nn.ModuleList((head.mlp_gate, head.mlp_up, head.mlp_down, head.readout))
        return list(layers.parameters())

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((hidden, self.refiner_head.summarise(hidden)), dim=-1)

    def logits(self, target: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(target, hidden[..., : self.config.hidden_size])

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        return draft_hidden[..., self.config.hidden_size :]

    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        rank = self.config.xpress_rank
        places = torch.arange(self.config.num_draft_tokens, device=states.device)
        depths = states[:, -1:].long()
        embedded = states[:, rank:-1].unflatten(1, (-1, rank))  # [N, P, R]
        new = self._embed(token_ids).to(states)
        embedded = torch.where((places == depths)[..., None], new[:, None], embedded)
        shares = self._token_mixer().permute(1, 2, 0)[depths[:, 0]]
        mixed = (shares.to(embedded) * embedded).sum(dim=1)
        return torch.cat((mixed, embedded.flatten(1), states[:, -1:] + 1), dim=1)

    def read(self, target: TargetModel, token_ids: torch.Tensor, draft_hidden: torch.Tensor) -> torch.Tensor:
        """Compute only the tokens' contribution to c, `[N, T, R]`; no branch can be continued from it."""
        length = token_ids.shape[1]
        embedded = self._embed(token_ids)
        return torch.einsum("rkj,njr->nkr", self._token_mixer()[:, :length, :length].to(embedded), embedded)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        head = self.refiner_head
        mixed = part + states[..., : self.config.xpress_rank]
        return mixed + head.mlp_down(F.silu(head.mlp_gate(mixed)) * head.mlp_up(mixed))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the contribution of tokens `[...]` to x, `[..., R]`."""
        head = self.refiner_head
        embeds = head.token_embed(token_ids.to(head.token_embed.weight.device))
        return partial_product(head.in_proj, embeds, 2 * self.config.xpress_rank)

    def _token_mixer(self) -> torch.Tensor:
        """The weight of each token's contribution, from the anchor on, in the state of each proposal, `[R, P, P]`."""
        mixer = self.refiner_head.mixer()
        if not self.config.label_offset:
            return mixer
        of_anchor = mixer[:, 1:, :1] + mixer[:, 1:, 1:2]  # the anchor is also the token before itself
        return torch.cat((of_anchor, mixer[:, 1:, 2:]), dim=2)

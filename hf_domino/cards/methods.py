"""What the cards say about each method, by `projector_type`."""

from __future__ import annotations

from dataclasses import dataclass

DFLASH = "[DFlash](https://arxiv.org/abs/2602.06036)"


@dataclass(frozen=True)
class MethodTexts:
    """The texts about one method in a card."""

    link: str  # its name, as a Markdown link
    way: str = ""  # how the method drafts, as a part of the card's sentence
    papers: tuple[str, ...] = ()  # papers to cite: names of files in the folder `papers`
    drafts_in_turn: bool = False  # whether each draft token needs those before it


METHOD_TEXTS = {
    "domino": MethodTexts(
        "[Domino](https://arxiv.org/abs/2605.29707)",
        f" (a {DFLASH} backbone), which a GRU corrects token by token",
        ("domino", "dflash"),
    ),
    "dflash": MethodTexts(f"plain {DFLASH}", papers=("dflash",)),
    "dspark": MethodTexts(
        "[DSpark](https://arxiv.org/abs/2607.05147)",
        f" (a {DFLASH} backbone), in which a Markov head corrects each token by the previous one",
        ("dspark", "dflash"),
    ),
    "dflash2": MethodTexts(
        "[DFlash 2](https://github.com/z-lab/dflash)",
        f" (a {DFLASH} backbone), in which a selector chooses each token by the previous one",
        ("dflash",),
    ),
    "dfly": MethodTexts(
        "[DFly](https://arxiv.org/abs/2607.25852)",
        f" (a {DFLASH} backbone), in which an MLP corrects the state of each token by the previous one",
        ("dfly", "dflash"),
    ),
    "xpress": MethodTexts(
        "[XPress](https://arxiv.org/abs/2608.02438)",
        f" (a {DFLASH} backbone), which a causal mixer corrects in a few passes over the whole block",
        ("xpress", "dflash"),
    ),
    "eagle3": MethodTexts(
        "[EAGLE-3](https://arxiv.org/abs/2503.01840)",
        " with one layer, which reads what it has drafted so far",
        ("eagle3",),
        drafts_in_turn=True,
    ),
    "recycling": MethodTexts("[token recycling](https://arxiv.org/abs/2408.08696)"),
}

"""Texts of the cards about each method, by `projector_type`."""

from __future__ import annotations

from dataclasses import dataclass

DFLASH = "[DFlash](https://arxiv.org/abs/2602.06036)"


@dataclass(frozen=True)
class Said:
    """The texts of a card about one method."""

    link: str  # its name, as Markdown
    way: str = ""  # how the method drafts, in the card's sentence
    papers: tuple[str, ...] = ()  # papers to cite, in the folder `papers`
    drafts_in_turn: bool = False  # whether a draft reads those before it


SAID = {
    "domino": Said(
        "[Domino](https://arxiv.org/abs/2605.29707)",
        f" (a {DFLASH} backbone), a GRU corrects them token by token",
        ("domino", "dflash"),
    ),
    "dflash": Said(f"plain {DFLASH}", papers=("dflash",)),
    "dspark": Said(
        "[DSpark](https://arxiv.org/abs/2607.05147)",
        f" (a {DFLASH} backbone), a Markov head corrects each by the token before it",
        ("dspark", "dflash"),
    ),
    "dflash2": Said(
        "[DFlash 2](https://github.com/z-lab/dflash)",
        f" (a {DFLASH} backbone), a selector reads the one before and chooses each",
        ("dflash",),
    ),
    "eagle3": Said(
        "[EAGLE-3](https://arxiv.org/abs/2503.01840)",
        " (one layer, which reads what it has drafted)",
        ("eagle3",),
        drafts_in_turn=True,
    ),
    "recycling": Said("[token recycling](https://arxiv.org/abs/2408.08696)"),
}

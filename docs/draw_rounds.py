"""Draw docs/rounds.svg from a call of the bundled pair: `python docs/draw_rounds.py`, in the repository's root."""

from __future__ import annotations

from html import escape
from itertools import accumulate
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino import DominoDraftModel

PROMPT = (
    "class Reader:\n    def __init__(self, file):\n        self.file = file\n\n    def read(self, size=-1):\n        if"
)
NUM_TOKENS = 32
CHARACTER, LINE, LEFT, TOP = 8.4, 30, 110, 66  # pixels
CARD, INK, FAINT = "#f6f8fa", "#24292f", "#57606a"
DRAFTED, OWN = ("#dafbe1", "#2f8a45"), ("#ddebfa", "#3b74b8")  # fill and edge


def rounds() -> list[list[str]]:
    """The new tokens by rounds, the prefill's first; whole blocks are drafted, so that every run draws the same."""
    target = AutoModelForCausalLM.from_pretrained("model_cards/pycoder-13m", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("model_cards/pycoder-13m")
    drafter = DominoDraftModel.from_pretrained(
        "model_cards/pycoder-13m-domino", dtype=torch.float32, draft_length="full"
    )
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=NUM_TOKENS, do_sample=False)
    tokens = [tokenizer.decode(token) for token in output[0, inputs["input_ids"].shape[1] :]]
    lengths = [1, *drafter.stats.acceptance_lengths]
    return [tokens[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]


def token_box(text: str, left: float, top: float, colours: tuple[str, str]) -> tuple[str, float]:
    """A token in a box, its spaces and line ends shown, and where the next one begins."""
    shown = text.replace("\n", "⏎").replace(" ", "·")
    width = CHARACTER * len(shown)
    fill, edge = colours
    box = f'<rect x="{left:.1f}" y="{top}" width="{width + 10:.1f}" height="22" rx="4" fill="{fill}" stroke="{edge}"/>'
    # A font of another width is squeezed into the box.
    place = f'x="{left + 5:.1f}" y="{top + 15.5}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'{box}<text {place} class="token">{escape(shown)}</text>', left + width + 14


def picture(lines: list[list[str]]) -> str:
    """The rounds as lines, beside each what it is."""
    parts, right = [], 0.0
    for number, tokens in enumerate(lines):
        top, left = TOP + LINE * number, float(LEFT)
        name = f"round {number}" if number else "prompt read"
        parts.append(f'<text x="{LEFT - 12}" y="{top + 15.5}" text-anchor="end" class="name">{name}</text>')
        for place, token in enumerate(tokens):
            drawn, left = token_box(token, left, top, OWN if place == len(tokens) - 1 else DRAFTED)
            parts.append(drawn)
        right = max(right, left)
    count, height = sum(map(len, lines)), TOP + LINE * len(lines) + 10
    head = f"{count} tokens in {len(lines)} forward passes of the target. Alone it needs {count}."
    legend = "green: drafted and accepted. Blue: the target's own token, which ends the round."
    style = (
        f".token{{font:14px ui-monospace,Menlo,Consolas,monospace;fill:{INK}}}"
        f".name{{font:13px sans-serif;fill:{FAINT}}}.head{{font:bold 16px sans-serif;fill:{INK}}}"
    )
    width = max(right, 720) + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}"><style>{style}</style>'
        f'<rect width="100%" height="100%" rx="8" fill="{CARD}"/>'
        f'<text x="16" y="28" class="head">{head}</text><text x="16" y="50" class="name">{legend}</text>'
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    Path("docs/rounds.svg").write_text(picture(rounds()), encoding="utf-8")

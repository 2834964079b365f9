"""A drafter that follows a target which something else trains: now and then, a few steps on the newest texts.

The texts are kept as tokens, and the target runs over a batch of them again: hidden states of the rollouts would be
those of older weights, and would take thousands of times the memory.

Shapes: B sequences, T prompt tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_domino.methods import DominoDraftModel
from hf_domino.target.view import TargetModel, input_device
from hf_domino.training.fields import TrainingFields
from hf_domino.training.muon import MuonWithAdamW
from hf_domino.training.objective.anchors import collate_rows, sample_anchors
from hf_domino.training.objective.forward import check_final
from hf_domino.training.objective.objective import Objective

STATE_FILE = "follower.pt"  # beside a drafter that was saved
MUON_RATE = 10  # in learning rates of AdamW, as in the defaults of a new drafter's training
NUM_ANCHORS = 16  # of a text in a step: all of them take far longer than the rollouts do


class Follower:
    """Trains a drafter with the loss of [`DominoTrainer`]; target and random state stay as they are.

    Args:
        drafter (`DominoDraftModel`): The drafter, which is trained in place and in fp32.
        target (`PreTrainedModel`): The target, with the weights that it has at the time of an update.
        learning_rate (`float`): Learning rate of AdamW; Muon's follows it.
        most_tokens (`int`): Tokens of texts that are kept at most; the oldest go first, and the newest stays.
    """

    def __init__(self, drafter: DominoDraftModel, target: PreTrainedModel, learning_rate: float, most_tokens: int):
        drafter.config.check_supports("training")
        self.updated_at = 0  # step of the target's training
        self.rows: list[dict[str, list[int]]] = []
        self._drafter = drafter.float()
        self._target = target
        self._most_tokens = most_tokens
        # Trainers go back to training mode with each step; dropout would draw from the random state here.
        view = TargetModel(target.eval(), drafter.config.layer_ids(target.config))
        check_final(view)
        self._objective = Objective(drafter, view, TrainingFields(), nullcontext)
        self._optimizer = MuonWithAdamW(drafter, MUON_RATE * learning_rate, learning_rate, weight_decay=0.0)

    def add(self, sequences: torch.Tensor, attention_mask: torch.Tensor | None, num_new: list[int]) -> None:
        """Keep the texts of a call of `generate`, without their padding.

        Args:
            sequences (`torch.Tensor`): Prompts and new tokens, `[B, T + most new tokens]`.
            attention_mask (`torch.Tensor`, *optional*): `[B, T]`, 0 where a prompt is padded on the left.
            num_new (`list[int]`): New tokens of each sequence.
        """
        width = sequences.shape[1] - max(num_new)
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences[:, :width])
        lengths = attention_mask[:, :width].sum(dim=1).tolist()
        for ids, length, count in zip(sequences.tolist(), lengths, num_new, strict=True):
            if count > 1:  # an anchor and its successor
                mask = [0] * length + [1] * count
                self.rows.append({"input_ids": ids[width - length : width + count], "loss_mask": mask})
        while len(self.rows) > 1 and sum(len(row["input_ids"]) for row in self.rows) > self._most_tokens:
            del self.rows[0]

    def update(self, step: int, num_steps: int, batch_size: int) -> None:
        """Train the drafter at a step of the target's training, on random batches of the texts, if there are any."""
        if not self.rows:
            return
        self.updated_at = step
        is_training = self._target.training
        self._target.eval()
        frozen = self._drafter.config.frozen
        # The target's embeddings take part, and must get no gradient.
        weights = [weight for name, weight in self._drafter.named_parameters() if name.split(".")[0] not in frozen]
        generator = torch.Generator().manual_seed(step)
        for chosen in torch.randint(len(self.rows), (num_steps, batch_size), generator=generator):
            batch = collate_rows([self.rows[index] for index in chosen], self._drafter.config.pad_token_id or 0)
            batch["anchors"] = sample_anchors(batch, NUM_ANCHORS, step)
            batch = {name: values.to(input_device(self._target)) for name, values in batch.items()}
            losses = self._objective.score(batch, lambda_base=0.0)
            (losses.loss / batch["loss_weight"].clamp(min=1e-6)).backward(inputs=weights)
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._target.train(is_training)

    def save(self, folder: Path) -> None:
        """Save the drafter, with all that later updates go by."""
        self._drafter.save_pretrained(folder)
        torch.save((self._optimizer.state_dict(), self.rows, self.updated_at), folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Go on from what was saved, if it was."""
        if not (folder / STATE_FILE).is_file():
            return
        saved = type(self._drafter).from_pretrained(folder, dtype=torch.float32)
        self._drafter.load_state_dict(saved.state_dict())
        state, self.rows, self.updated_at = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        self._optimizer.load_state_dict(state)

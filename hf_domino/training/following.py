"""Keep a drafter up to date while something else trains its target: now and then, a few steps on the newest texts.

Only the tokens of the texts are kept, and the target runs over a batch of them again. Hidden states from the rollouts
would belong to older weights and would take thousands of times the memory.

Shapes: B sequences, T prompt tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_domino.methods import DominoDraftModel
from hf_domino.targets.view import TargetModel, input_device
from hf_domino.training.drafter_training import DrafterTraining
from hf_domino.training.fields import TrainingFields
from hf_domino.training.muon import MuonWithAdamW
from hf_domino.training.objective.anchors import collate_rows, sample_anchors
from hf_domino.training.objective.forward import check_final

STATE_FILE = "follower.pt"  # in the folder of a saved drafter
MUON_RATE = 10  # Muon's learning rate divided by AdamW's, as in the defaults of a new drafter's training
NUM_ANCHORS = 16  # anchors of a text in a step; all of them would take far longer than the rollouts do


class Follower:
    """Trains a drafter with the loss of [`DominoTrainer`], without changing the target or the random state.

    Args:
        drafter (`DominoDraftModel`): The drafter, which is trained in place and in fp32.
        target (`PreTrainedModel`): The target. An update uses the weights that it has at that time.
        learning_rate (`float`): Learning rate of AdamW. Muon's is `MUON_RATE` times as high.
        most_tokens (`int`): Maximum number of tokens to keep. The oldest texts are dropped first, and the newest one is
            always kept.
    """

    def __init__(self, drafter: DominoDraftModel, target: PreTrainedModel, learning_rate: float, most_tokens: int):
        drafter.config.check_supports("training")
        self.updated_at = 0  # step of the target's training
        self.rows: list[dict[str, list[int]]] = []
        self._drafter = drafter.float()
        self._target = target
        self._most_tokens = most_tokens
        # Trainers switch the target back to training mode with each step, where dropout would use the random state.
        view = TargetModel(target.eval(), drafter.config.layer_ids(target.config))
        check_final(view)
        self._training = DrafterTraining(drafter, view, TrainingFields())
        self._optimizer = MuonWithAdamW(drafter, MUON_RATE * learning_rate, learning_rate, weight_decay=0.0)

    def add(self, sequences: torch.Tensor, attention_mask: torch.Tensor | None, num_new: list[int]) -> None:
        """Keep the texts of a call of `generate`, without their padding.

        Args:
            sequences (`torch.Tensor`): Prompts and new tokens, `[B, T + most new tokens]`.
            attention_mask (`torch.Tensor`, *optional*): `[B, T]`, 0 where a prompt is padded on the left.
            num_new (`list[int]`): Number of new tokens of each sequence.
        """
        width = sequences.shape[1] - max(num_new)
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences[:, :width])
        lengths = attention_mask[:, :width].sum(dim=1).tolist()
        for ids, length, count in zip(sequences.tolist(), lengths, num_new, strict=True):
            if count > 1:  # an anchor needs a successor
                mask = [0] * length + [1] * count
                self.rows.append({"input_ids": ids[width - length : width + count], "loss_mask": mask})
        while len(self.rows) > 1 and sum(len(row["input_ids"]) for row in self.rows) > self._most_tokens:
            del self.rows[0]

    def update(self, step: int, num_steps: int, batch_size: int) -> None:
        """Train the drafter on random batches of the texts, if there are any, at a step of the target's training."""
        if not self.rows:
            return
        self.updated_at = step
        is_training = self._target.training
        self._target.eval()
        frozen = self._drafter.config.frozen
        # The target's embeddings are part of the forward, but they must get no gradient.
        weights = [weight for name, weight in self._drafter.named_parameters() if name.split(".")[0] not in frozen]
        generator = torch.Generator().manual_seed(step)
        for chosen in torch.randint(len(self.rows), (num_steps, batch_size), generator=generator):
            batch = collate_rows([self.rows[index] for index in chosen], self._drafter.config.pad_token_id or 0)
            batch["anchors"] = sample_anchors(batch, NUM_ANCHORS, step)
            batch = {name: values.to(input_device(self._target)) for name, values in batch.items()}
            self._training.label(batch)
            losses = self._training(**batch, lambda_base=0.0)
            (losses.loss / batch["loss_weight"].clamp(min=1e-6)).backward(inputs=weights)
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._target.train(is_training)

    def save(self, folder: Path) -> None:
        """Save the drafter, with everything that later updates need."""
        self._drafter.save_pretrained(folder)
        torch.save((self._optimizer.state_dict(), self.rows, self.updated_at), folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Continue from a saved state if the folder has one."""
        if not (folder / STATE_FILE).is_file():
            return
        saved = type(self._drafter).from_pretrained(folder, dtype=torch.float32)
        self._drafter.load_state_dict(saved.state_dict())
        state, self.rows, self.updated_at = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        self._optimizer.load_state_dict(state)

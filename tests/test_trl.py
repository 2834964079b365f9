"""Rollouts that draft while the policy is trained: it learns the same, and the log says what drafting was worth."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from builders import build_drafter
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_domino
from hf_domino.integration.assisted_call import named
from hf_domino.training.following import Follower
from hf_domino.trl import DraftedRollouts

PROMPTS = [[5, 9, 33, 20], [7, 41], [12, 6, 9], [30, 31, 32, 33, 34]]
ROLLOUT = {"do_sample": True, "max_new_tokens": 16, "pad_token_id": 2}


class Rollouts(Trainer):
    """A trainer that writes rollouts with `generate` and likes even tokens: REINFORCE, in a few lines."""

    written: list

    def compute_loss(self, model, inputs, *args, **kwargs):
        with torch.no_grad():
            ids = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **ROLLOUT)
        width = inputs["input_ids"].shape[1]
        rewards = (ids[:, width:] % 2 == 0).float().mean(dim=1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - width), value=1)
        log_probs = model(ids, attention_mask=mask).logits[:, width - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(2, ids[:, width:, None])[..., 0].mean(dim=1)
        if model.training:
            self.written.append((ids.tolist(), rewards.tolist()))
        return -(chosen * (rewards - rewards.mean())).sum()

    def prediction_step(self, model, inputs, *args, **kwargs):
        with torch.no_grad():
            return self.compute_loss(model, inputs), None, None


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [[0] * (longest - len(row["input_ids"])) + row["input_ids"] for row in rows]
    ids = torch.tensor(padded)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.fixture
def make_trainer(target, tmp_path):
    """A function that builds such a trainer of a copy of the tiny target."""

    def build(callbacks=(), trainer=Rollouts, policy=target, **overrides):
        fields = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "remove_unused_columns": False,
        }
        rows = [{"input_ids": ids} for ids in PROMPTS]
        arguments = TrainingArguments(**(fields | overrides))
        built = trainer(
            copy.deepcopy(policy), arguments, collate, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks)
        )
        built.written = []
        return built

    return build


def same_weights(one, other):
    """Whether two models have the same weights."""
    weights = other.state_dict()
    return all(torch.equal(weight, weights[name]) for name, weight in one.state_dict().items())


def figures(trainer, prefix="rollout/"):
    """What each line of the log says about rollouts."""
    lines = [{name: log[name] for name in log if name.startswith(prefix)} for log in trainer.state.log_history]
    return [line for line in lines if line]


def test_the_training_is_the_same(make_trainer, target):
    plain = make_trainer()
    plain.train()
    drafted = make_trainer([DraftedRollouts(build_drafter(target))])
    drafted.train()
    assert drafted.written == plain.written
    assert same_weights(drafted.model, plain.model)
    assert figures(plain) == []


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_policy_with_dropout_is_told_that_its_weights_will_differ(make_trainer, target, dropout, monkeypatch):
    said = []
    monkeypatch.setattr("hf_domino.trl.notice", said.append)
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=dropout)
    policy = get_peft_model(copy.deepcopy(target), config)
    make_trainer([DraftedRollouts(build_drafter(target))], policy=policy, max_steps=1).train()
    assert [f"the policy has dropout (Dropout: {dropout:g})" in one for one in said] == [True] * (dropout > 0)


def test_attention_dropout_of_a_policy_is_told(make_trainer, target, monkeypatch):
    said, policy = [], copy.deepcopy(target)
    monkeypatch.setattr("hf_domino.trl.notice", said.append)
    for layer in policy.model.layers:
        layer.self_attn.attention_dropout = 0.1
    make_trainer([DraftedRollouts(build_drafter(target))], policy=policy, max_steps=1).train()
    assert len(said) == 1
    assert "(Qwen3Attention: 0.1)" in said[0]


def test_the_log_says_what_drafting_was_worth(make_trainer, target):
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append(dict(logs))

    callback = DraftedRollouts(build_drafter(target))
    trainer = make_trainer([callback, Tracker()])
    trainer.train()
    first, second = figures(trainer)
    assert [line["rollout/drafter_age"] for line in (first, second)] == [2, 4]
    assert 1 <= first["rollout/tokens_per_forward"] <= 6
    assert first["rollout/tokens_per_second"] > 0
    assert first["rollout/share_paused"] == 0
    assert first.items() <= seen[0].items()


def test_rollouts_of_evaluations_do_not_count(make_trainer, target):
    trainer = make_trainer([DraftedRollouts(build_drafter(target))], eval_strategy="steps", eval_steps=1)
    with_evaluations = trainer.train()
    counted = [{name: line[name] for name in line if "second" not in name} for line in figures(trainer)]
    trainer = make_trainer([DraftedRollouts(build_drafter(target))])
    trainer.train()
    assert with_evaluations.metrics["train_loss"]
    assert len(counted) == len(figures(trainer)) == 2


def test_the_policy_has_the_drafter_while_it_is_trained(make_trainer, target):
    callback = DraftedRollouts(build_drafter(target))
    trainer = make_trainer([callback])
    assert hf_domino.attached(trainer.model) is None
    trainer.train()
    assert hf_domino.attached(trainer.model) is None

    class Failing(Rollouts):
        def compute_loss(self, *args, **kwargs):
            raise RuntimeError("out of memory")

    trainer = make_trainer([callback], Failing)
    with pytest.raises(RuntimeError, match="out of memory"), callback:
        trainer.train()
    assert hf_domino.attached(trainer.model) is None


def test_a_policys_own_default_drafter_is_back_after_the_training(make_trainer, target):
    trainer = make_trainer([DraftedRollouts("recycling")])
    hf_domino.attach(trainer.model, build_drafter(target))
    before = hf_domino.attached(trainer.model)
    trainer.train()
    assert hf_domino.attached(trainer.model) is before
    assert not before.num_drafted

    class Chosen(Rollouts):
        def compute_loss(self, *args, **kwargs):
            hf_domino.detach(self.model)
            return super().compute_loss(*args, **kwargs)

    trainer = make_trainer([DraftedRollouts("recycling")], Chosen)
    hf_domino.attach(trainer.model, build_drafter(target))
    trainer.train()
    assert hf_domino.attached(trainer.model) is None, "what is detached meanwhile stays detached"


def test_a_drafter_by_name_is_trained_for_the_training_alone(make_trainer, target, tmp_path):
    """Calls that name it go on with the drafter of the folder, in the dtype of the target."""
    build_drafter(target).save_pretrained(tmp_path / "drafter")
    policy = target.to(torch.float64)
    trainer = make_trainer([DraftedRollouts(str(tmp_path / "drafter"), update_every=1)], policy=policy)
    trainer.train()
    used = named(trainer.model, str(tmp_path / "drafter"))
    assert used.dtype is torch.float64
    assert same_weights(used, build_drafter(target).double())


@pytest.mark.parametrize("given", ["default", "own", "none"])
def test_rollouts_look_up_in_earlier_ones(make_trainer, target, given):
    drafter, own, before = build_drafter(target), hf_domino.LookupMemory(), hf_domino.LookupMemory()
    drafter.memory = before if given == "own" else None
    seen = []

    class Noting(Rollouts):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            seen.append((drafter.memory, drafter.stats.num_lookups))
            return loss

    options = {"default": {}, "own": {"memory": own}, "none": {"memory": False}}[given]
    make_trainer([DraftedRollouts(drafter, **options)], Noting, learning_rate=0.0).train()
    memories, lookups = zip(*seen, strict=True)
    assert len({id(memory) for memory in memories}) == 1
    assert (sum(lookups) > 0) == (given != "none")
    if given == "none":
        assert memories[0] is None
    elif given == "own":
        assert memories[0] is own
    else:
        assert len(memories[0]) > 4 * 4 * 16
    assert drafter.memory is (before if given == "own" else None), "the drafter's own is back after the training"
    assert len(before) == 0


def test_a_drafter_that_was_of_no_use_is_told(make_trainer, target, caplog):
    class Elsewhere(Rollouts):
        def compute_loss(self, *args, **kwargs):
            with hf_domino.plain():
                return super().compute_loss(*args, **kwargs)

    make_trainer([DraftedRollouts(build_drafter(target))], Elsewhere).train()
    assert "drafted nothing" in caplog.text


def test_a_drafter_follows_and_leaves_the_training_as_it_is(make_trainer, target):
    plain = make_trainer()
    plain.train()
    drafter = build_drafter(target)
    frozen = copy.deepcopy(drafter)
    trainer = make_trainer([DraftedRollouts(drafter, update_every=1)], logging_steps=1)
    trainer.train()
    assert trainer.written == plain.written
    assert same_weights(trainer.model, plain.model)
    assert all(weight.grad is None or not weight.grad.any() for weight in trainer.model.parameters())
    assert not same_weights(drafter, frozen)
    lines = figures(trainer)
    assert [line["rollout/drafter_age"] for line in lines] == [1, 1, 1, 1]
    assert lines[0]["rollout/update_seconds"] < lines[1]["rollout/update_seconds"]  # before rollouts there are no texts


def test_an_adapter_is_followed_as_a_policy(make_trainer, target):
    torch.manual_seed(0)
    adapted = get_peft_model(copy.deepcopy(target), LoraConfig(r=4, target_modules=["q_proj"]))
    plain = make_trainer(policy=adapted)
    plain.train()
    drafted = make_trainer([DraftedRollouts(build_drafter(target), update_every=2)], policy=adapted)
    drafted.train()
    assert drafted.written == plain.written
    assert figures(drafted)[-1]["rollout/drafter_age"] == 2
    assert hf_domino.attached(drafted.model) is None


def test_updates_raise_acceptance(target):
    drafter = build_drafter(target)
    follower = Follower(drafter, target, learning_rate=3e-3, most_tokens=1000)
    prompts = torch.tensor([[5, 9, 33, 20], [7, 41, 8, 10]])

    def write():
        options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 2, "assistant_model": drafter}
        return target.generate(prompts, **options), drafter.stats

    ids, before = write()
    follower.add(ids, None, [40, 40])
    follower.update(step=1, num_steps=40, batch_size=2)
    again, after = write()
    assert torch.equal(again, ids)
    assert after.tokens_per_forward > 1.5 * before.tokens_per_forward


def test_a_training_goes_on_with_its_drafter(make_trainer, target, tmp_path):
    options = {"update_every": 2, "update_steps": 2}
    whole, resumed = build_drafter(target), build_drafter(target)
    make_trainer([DraftedRollouts(whole, **options)], save_strategy="steps", save_steps=3, max_steps=6).train()
    assert hf_domino.DominoDraftModel.from_pretrained(tmp_path / "run/checkpoint-3/drafter")
    trainer = make_trainer([DraftedRollouts(resumed, **options)], max_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-3"))
    assert figures(trainer)[-1]["rollout/drafter_age"] == 2
    assert same_weights(resumed, whole)


def test_only_the_newest_rollouts_are_kept_without_padding(target):
    follower = Follower(build_drafter(target), target, learning_rate=1e-3, most_tokens=14)
    sequences = torch.tensor([[0, 0, 5, 9, 11, 12, 13], [7, 8, 9, 10, 21, 22, 2], [0, 3, 4, 5, 31, 2, 2]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    follower.add(sequences, mask, [3, 2, 1])
    follower.add(sequences[1:2, :6], None, [2])
    rows = [(row["input_ids"], row["loss_mask"]) for row in follower.rows]
    assert rows == 2 * [([7, 8, 9, 10, 21, 22], [0, 0, 0, 0, 1, 1])]
    longer = torch.arange(20)[None]
    follower.add(longer, None, [4])
    assert [row["input_ids"] for row in follower.rows] == longer.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_every": -1}, r"update_every must be at least 0 \(0 to leave the drafter as it is\), got -1"),
        ({"update_steps": 0}, r"update_steps must be at least 1 \(left out: 4\), got 0"),
        ({"update_steps": 2.5}, r"update_steps must be a whole number \(left out: 4\), got 2\.5"),
        ({"buffer_tokens": 1}, r"buffer_tokens must be at least 2 \(left out: 16384\), got 1"),
        ({"learning_rate": float("nan")}, r"learning_rate must be in \[1e-12, 1\] \(left out: 5e-4\), got nan"),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        DraftedRollouts("a-drafter", **options)


def test_what_is_no_memory_is_refused_at_once():
    with pytest.raises(ValueError, match="memory must be a LookupMemory or None, got 'texts'"):
        DraftedRollouts("a-drafter", memory="texts")


def test_a_drafter_that_cannot_follow_is_refused(make_trainer, target):
    with pytest.raises(ValueError, match="must be a DominoDraftModel, got 'int'"):
        make_trainer([DraftedRollouts(42)]).train()
    with pytest.raises(ValueError, match="training"):
        make_trainer([DraftedRollouts(hf_domino.recycling(target), update_every=1)]).train()
    trainer = make_trainer([DraftedRollouts(build_drafter(target), update_every=1)])
    with pytest.raises(ValueError, match="several processes must be 0, got 1"):
        trainer.callback_handler.on_train_begin(SimpleNamespace(world_size=2), trainer.state, trainer.control)


def train_grpo(policy, tokenizer, folder, callbacks=()):
    """Train with TRL; returns the trainer, and completions and rewards of all steps."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    written = []

    def reward(completion_ids, **kwargs):
        rewards = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
        written.append((completion_ids, rewards))
        return rewards

    fields = {
        "max_steps": 3,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    prompts = Dataset.from_dict({"prompt": ["def f(x):", "a", "x = y"]})
    trainer = trl.GRPOTrainer(
        copy.deepcopy(policy), reward, trl.GRPOConfig(str(folder), **fields), train_dataset=prompts,
        processing_class=tokenizer, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer, written


def test_grpo_is_the_same(target, tiny_tokenizer, tmp_path):
    plain, expected = train_grpo(target, tiny_tokenizer, tmp_path / "plain")
    callback = DraftedRollouts(build_drafter(target), update_every=2, update_steps=1)
    drafted, written = train_grpo(target, tiny_tokenizer, tmp_path / "drafted", [callback])
    assert written == expected
    assert same_weights(drafted.model, plain.model)
    assert [line["rollout/drafter_age"] for line in figures(drafted)] == [1, 2, 1]
    assert figures(plain) == []

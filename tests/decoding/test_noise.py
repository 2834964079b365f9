"""The noise of a call is that of plain `generate`'s steps, kept or drawn again, and so are the numbers behind it."""

from __future__ import annotations

import gc
import logging
import random
import threading

import pytest
import torch

from hf_domino.decoding import noise as noise_module
from hf_domino.decoding.noise import MAX_BYTES, CallGenerator, StepNoise
from hf_domino.decoding.sampling import choose

V, SEED = 23, 5
CPU = torch.device("cpu")
SLICE = 4 * V  # bytes of the noise of a step of a row
BUDGETS = {"nothing": 0, "a slice": SLICE, "a few slices": 5 * SLICE, "all": MAX_BYTES}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def given_back():
    """A test that fails between two calls must not change those behind it."""
    yield
    noise_module._borrowers.clear()


def plain_noise(batch_size, num_steps):
    """What plain generation draws `[B, N, V]`, and the generator's state after each number of steps."""
    torch.manual_seed(SEED)
    noise, states = [], [torch.get_rng_state()]
    for _ in range(num_steps):
        noise.append(torch.empty(batch_size, V).exponential_())
        states.append(torch.get_rng_state())
    torch.manual_seed(SEED)
    return torch.stack(noise, dim=1), states


def bytes_held(noise):
    """Memory of all noise that is reached from an object, views counted by what they hold on to."""
    open_, seen, storages = [vars(noise)], set(), {}
    while open_:
        for one in gc.get_referents(open_.pop()):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float32 and one.numel() and one.gt(1).any():
                storages[one.data_ptr()] = one.untyped_storage().nbytes()
            elif isinstance(one, (dict, list, tuple)) and id(one) not in seen:
                seen.add(id(one))
                open_.append(one)
    return sum(storages.values())


def walk(noise, truth, num_steps, seed, most=4):
    """Rows that advance at their own pace, and leave one after the other, must see the noise of their own steps."""
    draws, batch_size = random.Random(seed), len(truth)
    steps, lasts = dict.fromkeys(range(batch_size), 0), [draws.randint(num_steps // 2, num_steps) for _ in truth]
    lasts[draws.randrange(batch_size)] = num_steps
    while steps:
        count = draws.randint(1, most)
        ahead = noise.ahead(list(steps), list(steps.values()), count)
        assert ahead.shape == (len(steps), count, V)
        assert ahead.gt(0).all()  # it is divided by, behind the last step too
        for index, (row, step) in enumerate(steps.items()):
            inside = min(count, num_steps - step)
            assert torch.equal(ahead[index, :inside], truth[row, step : step + inside]), (row, step)
        yield
        steps = {row: step + draws.choice([1, 1, count]) for row, step in steps.items()}
        steps = {row: step for row, step in steps.items() if step < lasts[row]}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_row_sees_the_noise_of_its_steps(budget, batch_size, monkeypatch):
    num_steps, drawn, draw = 30, [], torch.Tensor.exponential_
    for seed in range(6):
        truth, states = plain_noise(batch_size, num_steps)
        noise, most_held = StepNoise(batch_size, V, CPU, num_steps, BUDGETS[budget]), 0
        with monkeypatch.context() as patch:
            patch.setattr(
                torch.Tensor, "exponential_", lambda *args, **kwargs: drawn.append(1) or draw(*args, **kwargs)
            )
            for _ in walk(noise, truth, num_steps, seed):
                most_held = max(most_held, bytes_held(noise))
        noise.end(num_steps)
        assert most_held <= BUDGETS[budget]
        assert most_held or not BUDGETS[budget]
        assert torch.equal(torch.get_rng_state(), states[num_steps])
    assert len(drawn) >= 6 * num_steps
    assert budget != "all" or len(drawn) == 6 * num_steps  # none is drawn again, none behind the last step


@pytest.mark.parametrize("max_bytes", [0, MAX_BYTES])
@pytest.mark.parametrize(("num_steps", "expected"), [(3, 3), (5, 5), (7, 7), (9, 7)])
def test_the_default_generator_is_left_after_so_many_steps(num_steps, expected, max_bytes):
    """Below and at what was drawn; nobody can have got further."""
    truth, states = plain_noise(2, 9)
    noise = StepNoise(2, V, CPU, max_bytes=max_bytes)
    noise.ahead([0, 1], [0, 0], 4)
    assert torch.equal(noise.ahead([0, 1], [2, 3], 4)[1], truth[1, 3:7])
    assert not torch.equal(torch.get_rng_state(), states[expected])
    noise.end(num_steps)
    assert torch.equal(torch.get_rng_state(), states[expected])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [7, 4096, 151_936])
def test_a_choice_is_the_draw_of_multinomial(device, vocab_size):
    """Bit for bit, zeros among the probabilities, the generator's state included."""
    device = torch.device(device)
    default = noise_module.default_generator(device)
    for batch_size in (1, 3):
        scores = 3 * torch.randn(4, batch_size, vocab_size, device=device)
        scores[torch.rand(scores.shape, device=device) < 0.3] = -torch.inf
        torch.manual_seed(SEED)
        expected = [torch.multinomial(step.softmax(dim=-1), 1)[:, 0] for step in scores]
        after = default.get_state()
        torch.manual_seed(SEED)
        noise = StepNoise(batch_size, vocab_size, device, num_steps=4)
        rows = list(range(batch_size))
        tokens = choose(scores.transpose(0, 1), noise.ahead(rows, [0] * batch_size, 4))
        noise.end(4)
        assert torch.equal(tokens, torch.stack(expected, dim=1))
        assert torch.equal(default.get_state(), after)


def numbers(generator=None):
    return torch.empty(6).exponential_(generator=generator)


@pytest.fixture
def warned(caplog):
    """What was logged, once for each thing said in this test."""
    logging.Logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=noise_module.__name__):
        yield caplog
    logging.Logger.warning_once.cache_clear()


def test_a_call_has_plain_generations_numbers_and_nobody_else_meanwhile():
    torch.manual_seed(SEED)
    plain = numbers()
    beside = []
    for _ in range(2):
        torch.manual_seed(SEED)
        call = CallGenerator(CPU)
        beside.append(numbers())
        assert torch.equal(numbers(call.generator), plain)
        assert not torch.equal(beside[-1], plain)
        call.give_back(call.generator.get_state())
    assert torch.equal(*beside)  # a seed tells those too


@pytest.mark.parametrize("ends_first", ["first", "second"])
def test_a_call_beside_another_has_other_numbers(ends_first):
    """As in a processor that generates; the same ones the next time, for a seed."""
    torch.manual_seed(SEED)
    plain, found = torch.stack([numbers(), numbers()]), []
    for _ in range(2):
        torch.manual_seed(SEED)
        calls = [CallGenerator(CPU), CallGenerator(CPU), CallGenerator(CPU)]
        drawn = [numbers(call.generator) for call in calls]
        found.append(torch.stack(drawn))
        assert torch.equal(drawn[0], plain[0])
        assert len({tuple(values.tolist()) for values in [*drawn, numbers()]}) == 4
        for call in calls if ends_first == "first" else reversed(calls):
            call.give_back(call.generator.get_state())
        calls[0].give_back(torch.Generator().get_state())  # it owes nothing any more
        again = CallGenerator(CPU)
        assert torch.equal(numbers(again.generator), plain[1])
        again.give_back(again.generator.get_state())
    assert torch.equal(*found)


def test_a_default_generator_that_was_moved_is_told_of_once(warned):
    for has_moved in (False, True, True):
        torch.manual_seed(SEED)
        call = CallGenerator(CPU)
        state = call.generator.get_state()
        if has_moved:
            torch.rand(1)
        else:
            assert not warned.records
        call.give_back(state)
        assert torch.equal(torch.get_rng_state(), state)
    assert len(warned.records) == 1
    assert "default generator" in warned.text


def test_a_seed_that_is_set_meanwhile_stands(warned):
    call = CallGenerator(CPU)
    state = call.generator.get_state()
    torch.manual_seed(SEED)
    expected = torch.get_rng_state()
    call.give_back(state)
    assert torch.equal(torch.get_rng_state(), expected)
    assert not warned.records


@pytest.mark.parametrize("is_same_thread", [True, False])
def test_what_a_call_that_was_given_up_still_owes(is_same_thread):
    """A notebook keeps the traceback of a broken-off call: a new seed goes to the next call of its thread."""
    given_up, made = CallGenerator(CPU), []
    torch.manual_seed(SEED)
    expected = torch.get_rng_state()
    if is_same_thread:
        made.append(CallGenerator(CPU))
    else:
        thread = threading.Thread(target=lambda: made.append(CallGenerator(CPU)))
        thread.start()
        thread.join()
    assert torch.equal(made[0].generator.get_state(), expected) == is_same_thread
    given_up.give_back(given_up.generator.get_state())
    torch.empty(1, V).exponential_(generator=made[0].generator)
    made[0].give_back(made[0].generator.get_state())
    assert torch.initial_seed() == SEED
    assert torch.equal(torch.get_rng_state(), made[0].generator.get_state()) == is_same_thread


def test_a_call_that_is_collected_while_another_begins(monkeypatch):
    """Collecting one gives back, and may happen at any point of the same thread."""
    given_up, seed = [CallGenerator(CPU)], noise_module._seed
    torch.manual_seed(SEED)

    def collect(state):
        while given_up:
            given_up.pop().give_back(torch.Generator().get_state())
        return seed(state)

    monkeypatch.setattr(noise_module, "_seed", collect)
    call = CallGenerator(CPU)  # with a plain lock this would wait for itself
    call.give_back(call.generator.get_state())
    assert not given_up


def test_where_no_default_generator_tells_the_text(monkeypatch):
    """As on MPS: every call has other noise, and a seed repeats it."""
    monkeypatch.setattr(noise_module, "default_generator", lambda device: None)
    drawn = []
    for _ in range(2):
        torch.manual_seed(SEED)
        for _ in range(2):
            noise = StepNoise(1, V, CPU)
            drawn.append(noise.ahead([0], [0], 2))
            noise.end(1)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.stack(drawn[:2]), torch.stack(drawn[2:]))

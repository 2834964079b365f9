"""The noise of a call is that of plain `generate`'s steps, kept or drawn again, and so are the numbers behind it."""

from __future__ import annotations

import logging
import random
import threading

import pytest
import torch

from hf_domino.decoding.noise import generators
from hf_domino.decoding.noise.generators import CallGenerator
from hf_domino.decoding.noise.steps import MAX_BYTES, StepNoise
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
    generators._borrowers.clear()


def plain_noise(batch_size, num_steps):
    """What plain generation draws `[B, N, V]`, and the generator's state after each number of steps."""
    torch.manual_seed(SEED)
    noise, states = [], [torch.get_rng_state()]
    for _ in range(num_steps):
        noise.append(torch.empty(batch_size, V).exponential_())
        states.append(torch.get_rng_state())
    torch.manual_seed(SEED)
    return torch.stack(noise, dim=1), states


@pytest.fixture
def drawn(monkeypatch):
    """Steps that were drawn, in order."""
    steps, draw = [], StepNoise._draw

    def noting(self, step):
        steps.append(step)
        return draw(self, step)

    monkeypatch.setattr(StepNoise, "_draw", noting)
    return steps


def bytes_kept(noise):
    """Memory of all noise that is kept, views counted by what they hold on to."""
    kept = [tensor for steps in noise._kept.values() for tensor in steps.values()]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}.values())


def walk(noise, truth, num_steps, seed, most=4):
    """Rows that advance at their own pace, and leave one after the other, must see the noise of their own steps."""
    draws, batch_size = random.Random(seed), len(truth)
    steps, lasts = dict.fromkeys(range(batch_size), 0), [draws.randint(num_steps // 2, num_steps) for _ in truth]
    lasts[draws.randrange(batch_size)] = num_steps
    while steps:
        count = draws.randint(1, most)
        ahead = noise.ahead(list(steps), list(steps.values()), count)
        assert ahead.shape == (len(steps), count, V)
        for index, (row, step) in enumerate(steps.items()):
            inside = min(count, num_steps - step)
            assert torch.equal(ahead[index, :inside], truth[row, step : step + inside]), (row, step)
        yield dict(steps)
        steps = {row: step + draws.choice([1, 1, count]) for row, step in steps.items()}
        steps = {row: step for row, step in steps.items() if step < lasts[row]}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_row_sees_the_noise_of_its_steps(budget, batch_size, drawn):
    num_steps = 30
    for seed in range(6):
        truth, states = plain_noise(batch_size, num_steps)
        noise, most_kept = StepNoise(batch_size, V, CPU, num_steps, BUDGETS[budget]), 0
        drawn.clear()
        for steps in walk(noise, truth, num_steps, seed):
            most_kept = max(most_kept, bytes_kept(noise))
            assert len(noise._states) <= max(drawn) + 1 - min(steps.values())
        noise.end(num_steps)
        assert most_kept <= BUDGETS[budget]
        assert most_kept or not BUDGETS[budget]
        assert [step for index, step in enumerate(drawn) if step not in drawn[:index]] == list(range(num_steps))
        if budget == "all":
            assert len(drawn) == num_steps  # none is drawn again
        assert torch.equal(torch.get_rng_state(), states[num_steps])


def test_what_is_passed_makes_room(drawn):
    """Rows that keep together need the noise of one block, whatever the length of the text."""
    truth, _ = plain_noise(2, 40)
    noise = StepNoise(2, V, CPU, max_bytes=2 * 4 * SLICE)
    for step in range(0, 36, 2):
        assert torch.equal(noise.ahead([0, 1], [step, step], 4), truth[:, step : step + 4])
    assert drawn == list(range(38))
    noise.ahead([1], [36], 4)  # a row that leaves takes its noise with it
    assert bytes_kept(noise) == 4 * SLICE
    noise.ahead([1], [36], 8)
    assert bytes_kept(noise) == 8 * SLICE  # in the room that it left
    noise.end(37)


def test_nothing_is_drawn_behind_the_last_step(drawn):
    truth, states = plain_noise(2, 6)
    noise = StepNoise(2, V, CPU, num_steps=6)
    ahead = noise.ahead([0, 1], [0, 0], 4), noise.ahead([0, 1], [4, 3], 5)
    assert drawn == list(range(6))
    assert torch.equal(ahead[0], truth[:, :4])
    assert torch.equal(ahead[1][0, :2], truth[0, 4:])
    assert torch.equal(ahead[1][1, :3], truth[1, 3:])
    assert ahead[1].gt(0).all()  # it is divided by
    noise.end(6)
    assert torch.equal(torch.get_rng_state(), states[6])


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


def test_the_next_call_goes_on_from_there():
    truth, _ = plain_noise(1, 8)
    for first, committed in ((0, 3), (3, 2)):
        noise = StepNoise(1, V, CPU)
        assert torch.equal(noise.ahead([0], [0], 5), truth[:, first : first + 5])
        noise.end(committed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [7, 4096, 151_936])
def test_a_choice_is_the_draw_of_multinomial(device, vocab_size):
    """Bit for bit, zeros among the probabilities, the generator's state included."""
    device = torch.device(device)
    default = generators.default_generator(device)
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
    with caplog.at_level(logging.WARNING, logger=generators.__name__):
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
    torch.manual_seed(SEED)
    plain = torch.stack([numbers(), numbers()])
    torch.manual_seed(SEED)
    calls = [CallGenerator(CPU), CallGenerator(CPU), CallGenerator(CPU)]
    drawn = [numbers(call.generator) for call in calls]
    assert torch.equal(drawn[0], plain[0])
    assert len({tuple(values.tolist()) for values in [*drawn, numbers()]}) == 4
    for call in calls if ends_first == "first" else reversed(calls):
        call.give_back(call.generator.get_state())
    calls[0].give_back(torch.Generator().get_state())  # it owes nothing any more
    again = CallGenerator(CPU)
    assert torch.equal(numbers(again.generator), plain[1])
    again.give_back(again.generator.get_state())


def test_threads_that_begin_together_share_no_numbers():
    start, drawn = threading.Barrier(8, timeout=60), []

    def call():
        start.wait()
        mine = CallGenerator(CPU)
        drawn.append(tuple(numbers(mine.generator).tolist()))
        start.wait()
        mine.give_back(mine.generator.get_state())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == 8


def test_noise_is_fp32_whatever_torch_makes_by_default():
    expected, _ = plain_noise(1, 2)
    torch.set_default_dtype(torch.float64)
    try:
        noise = StepNoise(1, V, CPU, num_steps=2)
        found = noise.ahead([0], [0], 3)
        noise.end(2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[:, :2], expected)
    assert found.dtype == torch.float32


def test_calls_beside_another_repeat_with_the_seed():
    """What starts inside a call, as in a processor that generates, has other noise, and the same the next time."""
    states = []
    for _ in range(2):
        torch.manual_seed(SEED)
        outer, *inner = CallGenerator(CPU), CallGenerator(CPU), CallGenerator(CPU)
        states.append([call.generator.get_state() for call in (outer, *inner)])
        for call in (*inner, outer):
            call.give_back(call.generator.get_state())
    for first, second in zip(*states, strict=True):
        assert torch.equal(first, second)
    assert len({bytes(state.numpy()) for state in states[0]}) == 3


@pytest.mark.parametrize("is_watching", [True, False])
def test_a_default_generator_that_was_moved_is_told_of_once(warned, is_watching):
    for has_moved in (False, True, True):
        torch.manual_seed(SEED)
        call = CallGenerator(CPU, is_watching)
        state = call.generator.get_state()
        if has_moved:
            torch.rand(1)
        else:
            assert not warned.records
        call.give_back(state)
        assert torch.equal(torch.get_rng_state(), state)
    assert len(warned.records) == is_watching
    assert "default generator" in warned.text or not is_watching


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
    given_up, seed = [CallGenerator(CPU)], generators._seed
    torch.manual_seed(SEED)

    def collect(state):
        while given_up:
            given_up.pop().give_back(torch.Generator().get_state())
        return seed(state)

    monkeypatch.setattr(generators, "_seed", collect)
    call = CallGenerator(CPU)  # with a plain lock this would wait for itself
    call.give_back(call.generator.get_state())
    assert not given_up
    assert not generators._borrowers


def test_where_no_default_generator_tells_the_text(monkeypatch):
    """As on MPS: every call has other noise, and a seed repeats it."""
    monkeypatch.setattr(generators, "default_generator", lambda device: None)
    drawn = []
    for _ in range(2):
        torch.manual_seed(SEED)
        for _ in range(2):
            noise = StepNoise(1, V, CPU)
            drawn.append(noise.ahead([0], [0], 2))
            noise.end(1)
    assert not generators._borrowers
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.stack(drawn[:2]), torch.stack(drawn[2:]))

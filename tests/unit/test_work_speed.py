"""How long prompts and answers take is learned from stretches of mixed work."""

from __future__ import annotations

from random import Random

import pytest

from gemserve.api.access.work_speed import Work, WorkSpeed

PROMPT_S, TOKEN_S, ANSWER_S = 0.05, 0.00002, 0.002


def seconds_of(work: Work) -> float:
    return work.prompts * PROMPT_S + work.prompt_tokens * TOKEN_S + work.answer_tokens * ANSWER_S


def drawn(rng: Random) -> Work:
    tokens = 6000 if rng.random() < 0.3 else 350
    return Work(1, tokens, rng.randrange(2, 40))


def learn(speed: WorkSpeed, rng: Random, count: int) -> None:
    """Note so many requests, each prompt at its end and each token of its answer alone."""
    for _ in range(count):
        work = drawn(rng)
        noise = rng.uniform(0.7, 1.3)
        speed.note(Work(1, work.prompt_tokens), noise * seconds_of(Work(1, work.prompt_tokens)))
        for _ in range(int(work.answer_tokens)):
            speed.note(Work(answer_tokens=1), ANSWER_S)


def test_it_tells_long_prompts_short_ones_and_answers_apart() -> None:
    """By one speed for all tokens, a queue of long prompts seemed to take two to three times."""
    speed, rng = WorkSpeed(), Random(1)
    learn(speed, rng, 400)
    for work in (Work(10, 60_000, 200), Work(10, 3500, 200), Work(0, 0, 500), Work(20, 70_000)):
        assert speed.seconds(work) == pytest.approx(seconds_of(work), rel=0.15), work


def test_a_change_of_the_mix_is_known_soon() -> None:
    """While documents were cached, prompts took a thirtieth: for minutes later ones seemed to."""
    speed, rng = WorkSpeed(), Random(2)

    def read(count: int, prompt_s: float) -> None:
        for _ in range(count):
            speed.note(Work(1, 6000), rng.uniform(0.7, 1.3) * prompt_s)
            for _ in range(rng.randrange(2, 40)):
                speed.note(Work(answer_tokens=1), ANSWER_S)

    work, answers_s = Work(10, 60_000, 200), 200 * ANSWER_S
    read(400, 0.02)
    assert speed.seconds(work) == pytest.approx(0.2 + answers_s, rel=0.2)
    read(80, 0.6)
    assert speed.seconds(work) == pytest.approx(6 + answers_s, rel=0.3)
    read(200, 0.02)
    assert speed.seconds(work) == pytest.approx(0.2 + answers_s, rel=0.3)


def test_a_pause_counts_little() -> None:
    """A process that had been stopped for an hour seemed slow for minutes."""
    speed, rng = WorkSpeed(), Random(4)
    learn(speed, rng, 400)
    speed.note(Work(answer_tokens=1), 3600.0)
    learn(speed, rng, 20)
    work = Work(10, 60_000, 200)
    assert speed.seconds(work) == pytest.approx(seconds_of(work), rel=0.6)
    learn(speed, rng, 60)
    assert speed.seconds(work) == pytest.approx(seconds_of(work), rel=0.3)


def test_before_the_first_stretch_all_tokens_take_the_same() -> None:
    speed = WorkSpeed()
    assert not speed.is_known
    speed.note(Work(1, 900), 0.5)
    speed.note(Work(0, 0, 100), 0.5)
    assert speed.is_known
    assert speed.seconds(Work(5, 2000, 1000)) == pytest.approx(3.0, rel=0.01)


def test_no_time_is_below_zero() -> None:
    """Where more prompts came with less time by chance, further prompts would have saved time."""
    speed = WorkSpeed()
    for prompts, seconds in ((4, 4.0), (40, 1.0)) * 10:
        speed.note(Work(prompts, 100 * prompts, 10), seconds)
    for work in (Work(1), Work(0, 1), Work(0, 0, 1)):
        assert speed.seconds(work) >= 0


def test_a_long_answer_alone_does_not_make_prompts_slow() -> None:
    """Each of its tokens takes a step of its own, which took a fortieth of one beside others."""
    speed, rng = WorkSpeed(), Random(3)
    learn(speed, rng, 400)
    for _ in range(10_000):
        speed.note(Work(answer_tokens=1), 40 * ANSWER_S)
    assert speed.seconds(Work(1, 6000)) < 6 * seconds_of(Work(1, 6000))
    for _ in range(100):
        speed.note(Work(answer_tokens=1), 3600.0)
    assert speed.seconds(Work(1, 6000)) < 6 * seconds_of(Work(1, 6000))

"""Signs of life: who is silent, who is behind, and who ended well."""

import time

import pytest

from moejax.cluster.watchdog import FOLDER, Watchdog


class _Left(Exception):
    pass


def _leave(line: str) -> None:
    raise _Left(line)


def _dogs(tmp_path, count: int, patience_s: float = 100.0, lines: list[str] | None = None):
    """Watchdogs whose threads are not started: a test looks for them."""
    (tmp_path / FOLDER).mkdir(exist_ok=True)
    said = lines if lines is not None else []
    return [
        Watchdog(tmp_path, n, count, patience_s, say=said.append, leave=_leave)
        for n in range(count)
    ]


def _all_look(dogs) -> None:
    for dog in dogs:
        dog.look()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_silent_process_is_named_by_the_one_that_watches_it_and_all_leave(tmp_path, clock):
    dogs = _dogs(tmp_path, 4)
    for dog in dogs:
        dog.at(7)
    _all_look(dogs)
    others = [dogs[0], dogs[1], dogs[3]]
    for _ in range(9):
        clock[0] += 10
        _all_look(others)
    clock[0] += 21
    dogs[0].look()
    with pytest.raises(_Left, match=r"process 2 has given no sign of life for 100 s \(in step 7"):
        dogs[1].look()
    for dog in (dogs[0], dogs[3]):
        with pytest.raises(_Left, match="process 2 has given no sign"):
            dog.look()


def test_signs_of_life_are_enough_while_nothing_is_due(tmp_path, clock):
    dogs = _dogs(tmp_path, 2)
    for _ in range(1000):
        clock[0] += 50
        _all_look(dogs)


def test_the_one_that_is_behind_is_named_then_all_leave(tmp_path, clock):
    lines: list[str] = []
    dogs = _dogs(tmp_path, 3, lines=lines)
    for number, dog in enumerate(dogs):
        dog.at(6 if number == 1 else 7)
    for _ in range(5):
        _all_look(dogs)
        clock[0] += 30
    assert any("step 7 takes 120 s so far: waiting for process 1 (in step 6" in x for x in lines)
    assert len(lines) == 3  # each says it once
    with pytest.raises(_Left, match=r"step 7 did not end in \d+ s: waiting for process 1"):
        for _ in range(40):
            clock[0] += 30
            _all_look(dogs)


def test_when_all_wait_in_one_step_no_process_is_blamed(tmp_path, clock):
    lines: list[str] = []
    dogs = _dogs(tmp_path, 2, lines=lines)
    for dog in dogs:
        dog.at(7)
    _all_look(dogs)
    clock[0] += 110
    _all_look(dogs)
    assert "all processes have begun it" in lines[0]


def test_a_process_that_ended_well_is_missed_by_nobody(tmp_path):
    with Watchdog(tmp_path, 0, 2, 0.2, leave=_leave) as dog:
        with Watchdog(tmp_path, 1, 2, 0.2, leave=_leave):
            time.sleep(0.1)
        time.sleep(0.5)
        assert dog._thread is not None and dog._thread.is_alive()


def test_an_old_verdict_does_not_count(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "verdict").write_text("of the job before")
    with Watchdog(tmp_path, 0, 2, 0.1, leave=_leave) as dog:
        time.sleep(0.3)
        assert dog._thread is not None and dog._thread.is_alive()


@pytest.mark.parametrize(("count", "patience_s"), [(1, 10.0), (2, 0.0)])
def test_alone_or_turned_off_nothing_is_written(tmp_path, count, patience_s):
    with Watchdog(tmp_path, 0, count, patience_s, leave=_leave) as dog:
        dog.at(1)
    assert not (tmp_path / FOLDER).exists()

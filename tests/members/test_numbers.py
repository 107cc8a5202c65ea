"""What a machine says of itself in numbers, and how `commhooks machines` shows it."""

import math

import pytest
from rich.console import Console

from commhooks.members.numbers import Numbers
from commhooks.tools.machines import Row, table


def test_the_numbers_of_rounds() -> None:
    now, passes = [0.0], [0]
    numbers = Numbers(clock=lambda: now[0])
    numbers.passes = lambda: passes[0]
    assert numbers.limit_s == 60.0 and numbers.steps_per_s is None
    numbers.begin_round()
    now[0], passes[0] = 40.0, 20
    with numbers.waiting():
        now[0] = 50.0
    numbers.begin_round()
    assert numbers.steps_per_s == pytest.approx(20 / 50) and numbers.waited_s == 10.0
    assert numbers.limit_s == 3 * 40.0, "that others were late does not make it longer"
    now[0], passes[0] = 51.0, 30
    numbers.begin_round()
    assert numbers.steps_per_s == pytest.approx(10.0) and numbers.limit_s == 3 * 40.0
    numbers.round, numbers.bytes_sent = (lambda: 3), (lambda: 7)
    shown = numbers.shown()
    assert (shown["round"], shown["bytes_sent"], shown["weight"]) == (3, 7, None)
    assert numbers.stats()["members_since"] == shown["since"]


def test_the_table_of_machines() -> None:
    numbers = {"steps_per_s": 9.876, "weight": 1 / 3, "waited_s": 4.25, "bytes_sent": 12_345_678}
    rows = [
        Row("b", failure="10.0.0.2:1 refuses this machine: the request has another secret"),
        Row("a", numbers | {"round": 17, "since": 1000.0}),
        Row("c", numbers | {"round": 0, "since": 8000.0, "steps_per_s": None, "weight": None}),
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(rows, now=1000.0 + 3600 + 62))
    shown = capture.get()
    lines = [line.strip("│ ") for line in shown.splitlines()[3:6]]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert cells[0] == ["a", "17", "9.88", "33 %", "4.2 s", "12.3 MB", "1:01:02"]
    assert cells[1][0] == "b" and not any(cells[1][1:])
    assert cells[2] == ["c", "0", "", "", "4.2 s", "12.3 MB", "0:00:00"]
    assert "b: 10.0.0.2:1 refuses this machine: the request has another secret" in " ".join(
        shown.split()
    )
    with console.capture() as capture:
        console.print(table([], now=math.inf))
    assert "no machine has taken part yet" in capture.get()

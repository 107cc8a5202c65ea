"""Log lines that would repeat."""

from commhooks.members.lines import LINE_EVERY_S, Lines
from tests.support.ddp_steps import log_lines


def test_lines_come_again_after_a_while_and_are_forgotten_then() -> None:
    now = [0.0]
    lines = Lines(logs=True, clock=lambda: now[0])
    with log_lines("commhooks") as said:
        for number in range(4):
            now[0] = number * LINE_EVERY_S / 2
            lines.say("exchange %s failed", number, about=f"{number}")
            lines.say("a machine is silent")
            lines.say("another job uses the lighthouse", once=True)
    assert [sum(text in line for line in said) for text in ("failed", "silent", "job")] == [4, 2, 1]
    assert len(lines._said) == 4  # of the last 10 s, and the one that is said only once

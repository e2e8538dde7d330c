"""Which releases work together."""

from __future__ import annotations

import pytest

from kvpool.core import version
from kvpool.errors import VersionMismatch


@pytest.mark.parametrize(
    ("text", "found"),
    [("0.1.0", (0, 1)), ("1.4", (1, 4)), ("1.4.2rc1", (1, 4)), ("2.0.0.dev3+g12ab", (2, 0)), ("1.10rc1", (1, 10)),
     *((bad, None) for bad in ("", "1", "test", "1.x", "v1.2", "1.2\n", "1.2 3", "-1.2", "1" * 10 + ".2", "1.2." + "3" * 100,
                               "\u0661.\u0662"))],
)  # fmt: skip
def test_parse(text: str, found: tuple[int, int] | None) -> None:
    assert version.parse(text) == found


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [("1.4.0", "1.4.9", True), ("1.4.0", "1.5.0", True), ("1.4.0", "1.6.0", False), ("1.0.0", "2.0.0", False),
     ("1.9.0", "2.0.0", False), ("0.1.0", "0.1.0", True), ("0.1.0", "0.3.0", False), ("0.1.0", "", False), ("x", "x", False)],
)  # fmt: skip
def test_the_same_major_and_minors_at_most_one_apart(one: str, other: str, together: bool) -> None:
    assert version.work_together(one, other) is together is version.work_together(other, one)
    if together:
        version.check(one, peer_name="worker", own=other, own_name="master")
    else:
        with pytest.raises(VersionMismatch) as caught:
            version.check(one, peer_name="worker", own=other, own_name="master")
        assert (one or "no version") in str(caught.value) and other in str(caught.value)


def test_a_refusal_shows_no_control_characters_and_is_short() -> None:
    with pytest.raises(VersionMismatch) as caught:
        version.check("\x1b[31m" + "9" * 10_000, peer_name="worker", own="1.0.0", own_name="master")
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 400


def test_user_agents() -> None:
    assert version.of_user_agent("kvpool/0.1.0 grpc-python/1.60.0 grpc-c/37.0.0 (linux; chttp2)") == "0.1.0"
    assert version.of_user_agent("grpc-python/1.60 kvpool/3.2") == "3.2"
    for other in ("", "grpcurl/1.8", "notkvpool/1.0", "kvpool", "kvpool/", "kvpool/" + "1" * 100):
        assert version.of_user_agent(other) is None, other

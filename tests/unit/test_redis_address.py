"""Addresses of the store: what is taken, what is refused and named, and no password in anything that is shown."""

from __future__ import annotations

import pytest

from kvpool.errors import ConfigError
from kvpool.master.redis_link import parse
from kvpool.quantities import without_password

SECRET = "hush%21/w@rd"


def test_every_form_of_an_address() -> None:
    one = parse("redis://h")
    assert (one.kind, one.nodes, one.tls, one.db, one.username, one.password) == ("single", (("h", 6379),), False, 0, None, None)
    full = parse("rediss://me:s%40cret%2F@[::1]:7000/3?pool=a.b&ca=/etc/ca.pem")
    assert (full.nodes, full.tls, full.db, full.pool, full.ca) == ((("::1", 7000),), True, 3, "a.b", "/etc/ca.pem")
    assert (full.username, full.password) == ("me", "s@cret/")
    sentinel = parse("redis+sentinel://:pw@h1:1,h2/mymaster/2?sentinel_password=other")
    assert (sentinel.kind, sentinel.nodes, sentinel.service) == ("sentinel", (("h1", 1), ("h2", 26379)), "mymaster")
    assert (sentinel.db, sentinel.password, sentinel.sentinel_password) == (2, "pw", "other")
    cluster = parse("redis+cluster://h1:1,h2:2")
    assert (cluster.kind, cluster.nodes) == ("cluster", (("h1", 1), ("h2", 2)))
    for place in (one, full, sentinel, cluster):
        again = parse(str(place))
        assert (again.kind, again.nodes, again.db, again.service) == (place.kind, place.nodes, place.db, place.service)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("", "scheme"),
        ("lmdb:///x", "scheme"),
        ("redis://", "host"),
        ("redis://h:0", "host"),
        ("redis://h:70000", "host"),
        ("redis://h1,h2", "servers"),
        ("redis://h/x", "number"),
        ("redis://h/1/2", "number"),
        ("redis+cluster://h/1", "databases"),
        ("redis+sentinel://h:1", "service"),
        ("redis+sentinel://h1,,h2/s", "host"),
        ("redis+sentinel://" + ",".join(["h"] * 65) + "/s", "servers"),
        ("redis://h?poll=x", "'poll'"),
        ("redis://h?pool=", "pool"),
        ("redis://h?pool={x}", "pool"),
        ("redis://h?pool=a&pool=b", "pool"),
        ("redis://[::1", "address"),
    ],
)
def test_a_wrong_address_is_refused_naming_what_is_wrong(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(url)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://me:{SECRET}@h:1/0",
        f"redis://:{SECRET}@h:x/0",
        f"redis://me:{SECRET}@h:1/x?pool=a",
        f"nonsense://me:{SECRET}@h",
        f"redis://me:{SECRET}@[h",
        f"redis+sentinel://h/s?sentinel_password={SECRET}",
        f"redis+sentinel://h/s?sentinel_password={SECRET}&wrong=1",
    ],
)
def test_a_password_is_shown_nowhere(url: str) -> None:
    shown = [without_password(url)]
    try:
        place = parse(url)
        shown += [str(place), repr(place)]
    except ConfigError as error:
        shown += [str(error), repr(error), repr(error.__cause__)]
    for text in shown:
        assert not any(part in text for part in ("hush", "w@rd", "rd@")), text

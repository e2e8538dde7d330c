"""What connectors' settings and identities come to. Opening and failures: `tests/connectors`, with real engines."""

from __future__ import annotations

import pytest

import kvpool
from kvpool.connectors.pool_link import NAME_CHARS_MAX, LinkSettings, identity_text, namespace_name
from kvpool.core.namespaces import check_name
from kvpool.errors import InvalidArgument


def test_settings_are_taken_and_wrong_ones_named() -> None:
    given = {"master": "m:1", "deadline_ms": 50, "replicas": 2, "quota_bytes": None, "something": "of the engine's"}
    settings = LinkSettings.of(given, where="extra")
    assert (settings.master, settings.deadline_ms, settings.replicas, settings.quota_bytes) == ("m:1", 50, 2, None)
    for key, value in (("deadline_ms", "1"), ("deadline_ms", 0), ("replicas", True), ("master", 7), ("start_wait_ms", -1)):
        with pytest.raises(InvalidArgument, match=f"extra.*{key}"):
            LinkSettings.of({key: value}, where="extra")


def test_identities_differ_when_any_fact_does_however_long_they_are() -> None:
    facts = {"model": "m" * 400, "path": "p" * 300, "dtype": "bfloat16"}
    texts = {identity_text(facts), identity_text(facts | {"dtype": "float16"}), identity_text(facts | {"model": "m" * 401}),
             identity_text({"model": "a\nb"}), identity_text({"model": "a?b"}), identity_text({"model": "short"})}  # fmt: skip
    assert len(texts) == 6
    for text in texts:
        kvpool.KVLayout.opaque(block_bytes=1, name=text)  # what a layout's name may be


def test_names_are_allowed_and_stay_apart() -> None:
    names = [namespace_name("sglang", "my model/x", "", "pp0of2"), namespace_name("x" * 500, "a"), namespace_name("x" * 500, "b")]
    assert names[0] == "sglang.my-model-x.pp0of2"
    assert len(set(names)) == 3
    for name in names:
        assert check_name(name) == name
        assert len(name) <= NAME_CHARS_MAX

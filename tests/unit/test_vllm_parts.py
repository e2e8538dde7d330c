"""The parts of the vLLM connector that know nothing of vLLM: settings, the engine's identity, what travels between its halves."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kvpool.connectors.vllm.identity import FIELDS, Identity, differences, text_digest, values_of, weights_digest
from kvpool.connectors.vllm.plan import LoadJob, SaveJob, StepPlan, StepReport
from kvpool.connectors.vllm.settings import ConnectorSettings, parse
from kvpool.core.hashing import external_hashes
from kvpool.core.layout import KVLayout
from kvpool.core.namespaces import check_name
from kvpool.errors import ConfigError, InvalidArgument

VALUES = {**dict.fromkeys(FIELDS, "x"), "model": "org/Llama 3", "dtype": "bfloat16", "block": 32}


def identity(**changed: object) -> Identity:
    return Identity.of({**VALUES, **changed}, block_bytes=32768, block_tokens=32)


def test_every_field_makes_another_namespace_and_is_named() -> None:
    own = identity()
    names = {own.namespace}
    for field, words in FIELDS.items():
        other = identity(**{field: "other"})
        names.add(other.namespace)
        assert differences(own.values, other.values) == [f"{words} {_shown(VALUES[field])}, theirs other"]
        assert other.layout.fingerprint != own.layout.fingerprint
    assert len(names) == 1 + len(FIELDS)
    assert differences(own.values, identity().values) == []
    assert all(check_name(name) for name in names)


def _shown(value: object) -> str:
    return str(value)


def test_the_layout_tells_the_identity_again() -> None:
    own = identity()
    again = KVLayout.from_json(own.layout.to_json())
    assert values_of(again) == own.values
    assert again.is_opaque and again.block_bytes == 32768 and again.block_tokens == 32
    assert values_of(KVLayout.opaque(10)) is None
    assert values_of(KVLayout.opaque(10, name="[1,2]")) is None
    assert own.family == "vllm:org_Llama_3:" and own.namespace.startswith(own.family)


@pytest.mark.parametrize("text", ["a" * 500, 'quote"and\\slash', "name \u00e4\u00f6 \n", "\u6a21\u578b"])
def test_any_text_fits_and_texts_that_differ_stay_apart(text: str) -> None:
    own, other = identity(model=text), identity(model=text + "b")
    assert own.namespace != other.namespace
    assert values_of(own.layout) == own.values
    assert check_name(own.namespace) and check_name(other.namespace)


def test_all_fields_long_still_make_a_layout() -> None:
    long = Identity.of({name: f"{name}-" + "y" * 100 for name in FIELDS}, block_bytes=8, block_tokens=1)
    other = Identity.of({name: f"{name}-" + "z" * 100 for name in FIELDS}, block_bytes=8, block_tokens=1)
    assert long.layout.fingerprint != other.layout.fingerprint
    assert values_of(long.layout) is None


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'dtype'"):
        Identity.of({name: "" for name in FIELDS if name != "dtype"}, block_bytes=1, block_tokens=1)


def test_weights_of_the_same_size_and_name_have_other_digests(tmp_path: Path) -> None:
    data = bytearray(200_000)
    digests = set()
    for name, at in (("a", None), ("b", 0), ("c", 199_999), ("d", 100_000 // 15 * 15)):
        directory = tmp_path / name
        directory.mkdir()
        changed = bytearray(data)
        if at is not None:
            changed[at] = 1
        (directory / "model.safetensors").write_bytes(changed)
        (directory / "readme.txt").write_text(name)
        digests.add(weights_digest(directory))
    assert len(digests) >= 3, "the ends of a file are always looked at"
    assert "" not in digests
    (tmp_path / "empty").mkdir()
    assert weights_digest(tmp_path / "empty") == ""


def test_digests_do_not_depend_on_order() -> None:
    assert text_digest({"a": 1, "b": [2]}) == text_digest({"b": [2], "a": 1}) != text_digest({"a": 1, "b": [3]})


def test_settings_are_checked() -> None:
    assert parse({}) == ConnectorSettings()
    assert parse({"master": "m:1", "deadline_ms": 50, "save_pinned_part": 1}).save_pinned_part == 1.0
    for extra, words in (
        ({"deadline": 5}, "unknown key 'deadline' (did you mean 'deadline_ms'?)"),
        ({"deadline_ms": "200"}, "deadline_ms: '200' is no int"),
        ({"deadline_ms": True}, "deadline_ms: True is no int"),
        ({"deadline_ms": 0}, "deadline_ms: 0 is not in 1..600000"),
        ({"lookup": "disk"}, "lookup: 'disk' is not one of"),
        ({"load_async": 1}, "load_async: 1 is no bool"),
    ):
        with pytest.raises(ConfigError) as error:
            parse(extra)
        assert words in str(error.value)


def test_the_deadline_leaves_time_for_the_bytes() -> None:
    assert ConnectorSettings().load_deadline_ms(0) == 200
    assert ConnectorSettings().load_deadline_ms(1_000_000_000) == 1200
    assert ConnectorSettings(load_mbps_min=0).load_deadline_ms(1 << 40) == 200


def test_plans_and_reports_travel_and_add_up() -> None:
    chain = external_hashes([bytes([i]) * 32 for i in range(4)])
    plan = StepPlan([LoadJob("r", chain[1:3], [7, 8], b"token", 150.0, True)], [SaveJob(1, chain[3:], [9])], idle=True)
    again = pickle.loads(pickle.dumps(plan))  # as vLLM does
    assert again == plan and again.loads[0].hashes.depth == 1 and again.saves[0].hashes.parent == chain[2]
    report = StepReport()
    assert not report
    report.add(StepReport(released={1: 1}, loaded={"r": 1}, failed={"r": "timeout"}))
    report.add(StepReport(released={1: 1, 2: 1}, loaded={"r": 1}))
    assert report == StepReport({1: 2, 2: 1}, {"r": 2}, {"r": "timeout"}) and report

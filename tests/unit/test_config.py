"""Settings: nothing is ignored in silence, every error names key, source, what is allowed and the nearest right name (B61)."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool import config, quantities
from kvpool.config import ClientSettings, MasterSettings, Role, Settings, UpSettings, WorkerSettings, effective, load, sources
from kvpool.errors import ConfigError
from kvpool.quantities import GIB, MIB


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KV"):
            monkeypatch.delenv(name)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvpool.toml"
    path.write_text(text)
    return path


def refused(*words: str, role: str = "worker", file: Path | None = None, **flags: Any) -> str:
    """The text of the ConfigError that loading gives; it has all of `words`."""
    with pytest.raises(ConfigError) as caught:
        load(role, file=file, flags=flags)
    text = str(caught.value)
    assert all(word in text for word in words), f"{words} not all in: {text}"
    return text


# --- where values come from -----------------------------------------------------------------------------------------------


def test_each_source_goes_before_the_one_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path, '[worker]\ndram = "2GiB"\nport = 5\nio_threads = 7\nidle_timeout_ms = "20s"\n[master]\nport = 9\n')
    monkeypatch.setenv("KVPOOL_WORKER__PORT", "6")
    monkeypatch.setenv("KVPOOL_WORKER__IO_THREADS", "8")
    monkeypatch.setenv("KVPOOL_MASTER__PORT", "10")
    settings = load("worker", file=file, flags={"io_threads": 9, "host": None})
    assert isinstance(settings, WorkerSettings)
    assert (settings.dram, settings.port, settings.io_threads, settings.idle_timeout_ms) == (2 * GIB, 6, 9, 20_000)
    assert (settings.host, settings.ring_bytes) == ("127.0.0.1", 32 * MIB)
    where = sources(settings)
    assert where["dram"] == f"{file} [worker]" and where["port"] == "KVPOOL_WORKER__PORT"
    assert where["io_threads"] == "flag --io-threads" and where["host"] == "default"
    assert load("master", file=file).port == 10


def test_every_setting_can_be_set_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its default is within its own range, and survives being written down and read again."""
    for role, cls in config.ROLES.items():
        defaults = effective(load(role.value))
        assert set(defaults) == set(cls.model_fields) == set(sources(cls()))
        body = "".join(f"{name} = {json.dumps(value)}\n" for name, value in defaults.items())
        assert effective(load(role.value, file=toml(tmp_path, f"[{role}]\n{body}"))) == defaults
        with monkeypatch.context() as patch:
            for name, value in defaults.items():
                patch.setenv(config.variable(role, name), str(value))
            assert effective(load(role.value)) == defaults
        assert effective(load(role.value, flags=defaults)) == defaults
        assert json.loads(json.dumps(defaults)) == defaults
        assert all(field.description for field in cls.model_fields.values())


def test_defaults_are_the_documented_ones() -> None:
    master, worker, client, up = load("master"), load("worker"), load("client"), load("up")
    assert (master.host, master.port, master.http_port, master.store, master.insecure) == ("127.0.0.1", 7400, 7401, "", False)
    assert (master.heartbeat_ms, master.suspect_after_ms, master.dead_after_ms) == (500, 1500, 4000)
    assert (worker.master, worker.port, worker.dram, worker.ssd, worker.ssd_place) == ("127.0.0.1:7400", 0, GIB, "", None)
    assert (worker.high_watermark, worker.low_watermark, worker.hold_ttl_ms_max) == (0.9, 0.75, 600_000)
    assert (client.transport, client.verify, client.mirror, client.mirror_bytes_max) == ("auto", "transit", True, 256 * MIB)
    assert (up.workers, up.dram, up.host) == (1, GIB, "127.0.0.1")


def test_settings_are_frozen_and_read_no_environment_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1")
    monkeypatch.setenv("KVPOOL_MASTER__PORT", "1")
    settings = MasterSettings(port=5)
    assert settings.port == 5 and MasterSettings().port == 7400
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 6  # type: ignore[misc]


def test_short_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_MASTER", "m1:7400,m2:7400")
    monkeypatch.setenv("KVPOOL_TRANSPORT", "tcp")
    assert load("worker").master == load("client").master == "m1:7400,m2:7400" and load("client").transport == "tcp"
    assert load("master").port == 7400 and load("up").port == 7400
    monkeypatch.setenv("KVPOOL_CLIENT__MASTER", "m3:1")
    assert load("client").master == "m3:1" and load("worker").master == "m1:7400,m2:7400"
    assert load("client", flags={"master": "m4:1"}).master == "m4:1"
    monkeypatch.setenv("KVPOOL_TRANSPORT", "rdma")
    refused("transport", "KVPOOL_TRANSPORT", "rdma", "auto", role="client")


def test_data_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for settings in (load("master"), load("worker"), load("up")):
        assert settings.data_dir == tmp_path / "kvpool" / settings.role
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("master").data_dir == tmp_path / ".local/state/kvpool/master"
    assert load("master", flags={"data_dir": "~/x"}).data_dir == tmp_path / "x"
    assert load("master", flags={"data_dir": Path("rel")}).data_dir == Path("rel")
    refused("data_dir", "empty", data_dir="")
    refused("data_dir", data_dir=5)


def test_effective_hides_the_token() -> None:
    settings = load("client", flags={"token": "secret"})
    assert effective(settings)["token"] == "***" and settings.token == "secret" and "secret" not in repr(settings)
    assert effective(load("client"))["token"] == ""
    assert "secret" not in refused("token", role="client", token=["secret"])


def test_effective_hides_the_password_of_the_store() -> None:
    settings = load("master", flags={"store": "redis://:secret@r:6379/0?sentinel_password=secret"})
    assert effective(settings)["store"] == "redis://***@r:6379/0?sentinel_password=***" and "secret" not in repr(settings)
    assert effective(load("master"))["store"] == ""
    assert "secret" not in refused("store", role="master", store=["redis://:secret@r"])
    assert "secret" not in refused("port", role="master", store="redis://:secret@r", port=-1)


# --- misspelt and misplaced -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[worker]\ndrm = 1", ["drm", "[worker]", "did you mean dram"]),
        ("[worker]\nhigh_watermrk = 0.5", ["high_watermrk", "did you mean high_watermark"]),
        ("[worker]\nDRAM = 1", ["DRAM", "did you mean dram"]),
        ("[worker]\nzzzzzz = 1", ["zzzzzz", "settings are", "dram"]),
        ("[master]\nssd = '/x:1GiB'", ["ssd", "[master]", "belongs in [worker] or [up]"]),
        ("[client]\nheartbeat_ms = 5", ["heartbeat_ms", "[client]", "belongs in [master]"]),
        ("[wroker]\ndram = 1", ["[wroker]", "did you mean [worker]"]),
        ("[worker.memory]\ndram = 1", ["memory", "[worker]"]),
        ("dram = 1", ["dram", "outside a table", "[worker] or [up]"]),
        ("zzz = 1", ["zzz", "outside a table"]),
        ("worker = 1", ["worker", "[worker]"]),
        ("[[worker]]\ndram = 1", ["worker", "table"]),
    ],
)
def test_wrong_names_in_a_file(tmp_path: Path, text: str, words: list[str]) -> None:
    """Whichever role reads it: one file serves all roles."""
    for role in Role:
        refused("kvpool.toml", *words, role=role.value, file=toml(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("KVPOOL_WORKER__DRM", "KVPOOL_WORKER__DRAM"),
        ("KVPOOL_WORKER__HIGH_WATERMRK", "KVPOOL_WORKER__HIGH_WATERMARK"),
        ("KVPOOL_MASTR__PORT", "KVPOOL_MASTER__PORT"),
        ("KVPOOL_MASTER__HEARTBEAT", "KVPOOL_MASTER__HEARTBEAT_MS"),
        ("KVPOOL_WORKER_DRAM", "KVPOOL_WORKER__DRAM"),
        ("KV_POOL_WORKER__DRAM", "KVPOOL_WORKER__DRAM"),
        ("kvpool_worker__dram", "KVPOOL_WORKER__DRAM"),
        ("KVPOOL_TRANSPRT", "KVPOOL_TRANSPORT"),
        ("KVPOOL_MASTERS", "KVPOOL_MASTER"),
        ("KVPOOL_WORKER__", "KVPOOL_WORKER__"),
        ("KVPOOL_ZZZZ__YYYY", "KVPOOL_<ROLE>__<FIELD>"),
        ("KVPOOL_UP__SHOES", "KVPOOL_UP__"),
    ],
)
def test_misspelt_variables(monkeypatch: pytest.MonkeyPatch, name: str, near: str) -> None:
    monkeypatch.setenv(name, "1")
    for role in Role:  # of any role: `up` hands its environment to all of them
        refused(f"environment variable {name}: ", near, role=role.value)


def test_foreign_variables_are_let_be(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What Kubernetes sets beside a Service called kvpool-master is no mistake; the unknown rest is warned of."""
    links = {
        "KVPOOL_MASTER_SERVICE_HOST": "10.0.0.1",
        "KVPOOL_MASTER_SERVICE_PORT": "7400",
        "KVPOOL_MASTER_SERVICE_PORT_GRPC": "7400",
        "KVPOOL_MASTER_PORT": "tcp://10.0.0.1:7400",
        "KVPOOL_MASTER_PORT_7400_TCP": "tcp://10.0.0.1:7400",
        "KVPOOL_MASTER_PORT_7400_TCP_PROTO": "tcp",
        "KVPOOL_MASTER_PORT_7400_TCP_ADDR": "10.0.0.1",
        "KVPOOL_PORT": "tcp://10.0.0.1:7400",
        "KVPOOL_SERVICE_HOST": "10.0.0.1",
    }
    for name, value in links.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        assert load("master").port == 7400
    assert not caplog.records
    monkeypatch.setenv("KVPOOL_SOMETHING_ELSE", "1")
    with caplog.at_level(logging.WARNING):
        load("master")
    assert [record.getMessage() for record in caplog.records] == ["event=unknown_variable name=KVPOOL_SOMETHING_ELSE"]
    monkeypatch.setenv("KVPOOL_MASTER_PORT", "7500")  # not what Kubernetes writes: somebody meant the port
    refused("KVPOOL_MASTER_PORT: ", "KVPOOL_MASTER__PORT")


def test_misspelt_flags() -> None:
    refused("drm", "worker", "did you mean dram", drm=1)
    refused("drm", "did you mean dram", drm=None)
    refused("transprt", "did you mean transport", role="client", transprt="tcp")


def test_unknown_role() -> None:
    for role in ("wurker", "Worker", ""):
        with pytest.raises(ConfigError, match=r"role: .* master, worker, client, up"):
            load(role)


def test_settings_built_directly_refuse_unknown_names() -> None:
    for cls in config.ROLES.values():
        with pytest.raises(ValueError, match="bogus"):
            cls(bogus=1)


# --- wrong values ---------------------------------------------------------------------------------------------------------

SIZES: list[tuple[Any, int | str]] = [
    ("64", "below 4096"),
    ("64MB", 64_000_000),
    ("64 GiB", 64 * GIB),
    (1e9, "whole bytes"),
    ("1e9", "whole bytes"),
    (-1, "below 4096"),
    ("-1", "below 4096"),
    (0, "below 4096"),
    ("0", "below 4096"),
    ("", "whole bytes"),
    ("null", "whole bytes"),
    (True, "whole bytes"),
    ("true", "whole bytes"),
    ("1.5GiB", GIB + GIB // 2),
    ("64Mb", "did you mean 'MB'"),
    ("64mib", "did you mean 'MiB'"),
    ("64M", "did you mean"),
    ("64 parsecs", "units are"),
    ("64  GiB", "whole bytes"),
    (" 64GiB", "whole bytes"),
    ("64GiB ", "whole bytes"),
    ("1.5B", "no whole number"),
    ("GiB", "whole bytes"),
    ("9999999TiB", "above"),
    ("1" * 30, "whole bytes"),
    ("٣GiB", "whole bytes"),
    ("0x1000", "whole bytes"),
    ("1_000_000", "whole bytes"),
    ([], "whole bytes"),
    ({}, "whole bytes"),
    ("nan", "whole bytes"),
    ("64KB", 64_000),
    ("64KiB", 65_536),
    ("4096B", 4096),
    (5000, 5000),
    ("5000", 5000),
    ("2TB", 2 * 10**12),
    ("2TiB", 2 << 40),
]


@pytest.mark.parametrize(("value", "want"), SIZES, ids=repr)
def test_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, want: int | str) -> None:
    """As flag, in a file and as variable: read as meant, or refused with key, source and range."""
    file = None
    with monkeypatch.context() as patch:
        if isinstance(value, str):
            patch.setenv("KVPOOL_WORKER__DRAM", value)
            if isinstance(want, int):
                assert load("worker").dram == want
            else:
                refused("dram", "KVPOOL_WORKER__DRAM", want, "allowed: from 4096 to")
    if not isinstance(value, (list, dict)):
        written = json.dumps(value, ensure_ascii=False)
        file = toml(tmp_path, f"[worker]\ndram = {written}")
        if isinstance(want, int):
            assert load("worker", file=file).dram == want
        else:
            refused("dram", "kvpool.toml [worker]", want, "allowed: from 4096 to", file=file)
    if isinstance(want, int):
        assert load("worker", flags={"dram": value}).dram == want
    else:
        refused("dram", "flag --dram", want, "allowed: from 4096 to", dram=value)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("30s", 30_000),
        ("500ms", 500),
        ("1.5s", 1500),
        ("2min", 120_000),
        ("10m", "did you mean 'min'"),
        ("10M", "did you mean 'min'"),
        ("1h", 3_600_000),
        (1500, 1500),
        ("1500", 1500),
        ("1 s", 1000),
        ("30S", "did you mean 's'"),
        ("1.5ms", "no whole number"),
        ("30sec", "units are"),
        (30.0, "milliseconds"),
        ("", "milliseconds"),
        (True, "milliseconds"),
        (0, "below 1"),
        ("0s", "below 1"),
        (-5, "below 1"),
        ("25h", "above"),
        ("soon", "milliseconds"),
    ],
    ids=repr,
)
def test_times(value: Any, want: int | str) -> None:
    if isinstance(want, int):
        assert load("worker", flags={"hold_ttl_ms_max": value}).hold_ttl_ms_max == want
    else:
        refused("hold_ttl_ms_max", "flag --hold-ttl-ms-max", want, "allowed: from 1 to 86400000", hold_ttl_ms_max=value)


@pytest.mark.parametrize("value", [-1, 65536, "", "http", 7400.0, "7400.0", True, "1e3", " 7", "٧", [], 10**30])
def test_bad_ports(value: Any) -> None:
    refused("port", "flag --port", "allowed: from 0 to 65535", port=value)


@pytest.mark.parametrize("value", ["", "maybe", 1, 0, "2", "tru", 1.0, []])
def test_bad_switches(value: Any) -> None:
    refused("insecure", "flag --insecure", "true or false", insecure=value)


@pytest.mark.parametrize(
    ("value", "want"), [("true", True), ("False", False), ("1", True), ("0", False), ("yes", True), ("off", False)]
)
def test_good_switches(monkeypatch: pytest.MonkeyPatch, value: str, want: bool) -> None:
    monkeypatch.setenv("KVPOOL_CLIENT__MIRROR", value)
    assert load("client").mirror is want


@pytest.mark.parametrize(
    "value", [1.5, -0.1, 0, "high", "", True, "inf", "nan", float("inf"), float("nan"), 10**400, []], ids=lambda v: repr(v)[:12]
)
def test_bad_watermarks(value: Any) -> None:
    refused("high_watermark", "flag --high-watermark", "allowed: above 0 to 1", high_watermark=value)


def test_watermarks_in_the_wrong_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("low_watermark: 0.95 must be below high_watermark, 0.9", "flag --low-watermark", low_watermark=0.95)
    refused("low_watermark", low_watermark=0.5, high_watermark="0.5")
    monkeypatch.setenv("KVPOOL_WORKER__HIGH_WATERMARK", "0.3")
    file = toml(tmp_path, "[worker]\nlow_watermark = 0.4")
    refused("0.4", "0.3", "kvpool.toml", "KVPOOL_WORKER__HIGH_WATERMARK", file=file)
    assert load("worker", file=file, flags={"high_watermark": 1}).high_watermark == 1


def test_other_orders() -> None:
    refused("suspect_after_ms", "heartbeat_ms", "5000", role="master", suspect_after_ms=5000)
    refused("suspect_after_ms", role="master", heartbeat_ms=1500)
    refused("ring_bytes", "ring_total_bytes", ring_bytes="1GiB", ring_total_bytes="512MiB")
    refused("token", "token_file", "argument token", role="client", token="a", token_file="b")


def test_several_wrong_values_are_all_named() -> None:
    refused("dram", "port", "io_threads", dram=-1, port="x", io_threads=0)


@pytest.mark.parametrize(
    "value",
    [
        "x",
        "",
        "host",
        "host:",
        ":7400",
        "host:0",
        "host:65536",
        "host:-1",
        "host:7400x",
        "a:1,",
        "a:1,,b:2",
        "::1:7400",
        7400,
        "a b:1",
        "http://a:1",
        "a:١",
    ],
)
def test_bad_addresses(value: Any) -> None:
    refused("master", "flag --master", "host", master=value) if isinstance(value, str) else refused("master", master=value)


def test_good_addresses() -> None:
    for text in ("a:1", "127.0.0.1:7400", "[::1]:7400", "m1:7400, m2:7400"):
        assert load("worker", flags={"master": text}).master == text
    assert quantities.split_addresses("[::1]:7400, b:1") == [("::1", 7400), ("b", 1)]


@pytest.mark.parametrize("value", ["/x", "/x:", ":1GiB", "/x:1", "/x:-5", "/x:big", "/x:64Mb", 5, "/x:9999999TiB"])
def test_bad_ssd(value: Any) -> None:
    for role in ("worker", "up"):
        refused("ssd", "flag --ssd", role=role, ssd=value)


def test_good_ssd() -> None:
    place = load("worker", flags={"ssd": "/mnt/a:b:20GiB"}).ssd_place
    assert place is not None and (place.directory, place.size_bytes) == (Path("/mnt/a:b"), 20 * GIB)


# --- safe by default ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["master", "worker", "up"])
@pytest.mark.parametrize("name", ["host", "http_host"])
def test_another_address_needs_a_token_or_the_word(role: str, name: str) -> None:
    for host in ("10.0.0.1", "example.com", "fe80::1"):
        refused(name, host, "token_file", "insecure", role=role, **{name: host})
        assert load(role, flags={name: host, "token_file": "t"}) and load(role, flags={name: host, "insecure": True})
    for host in ("127.0.0.1", "127.5.0.1", "::1", "localhost"):
        assert getattr(load(role, flags={name: host}), name) == host
    for host in ("", "a b", "http://a", 5):
        refused(name, role=role, **{name: host})


def test_everywhere_is_no_address_for_others() -> None:
    for host in ("0.0.0.0", "::"):
        refused(host, "token_file", host=host)
        refused("advertise", host, host=host, insecure=True)
        assert load("worker", flags={"host": host, "insecure": True, "advertise": "10.1.2.3"}).advertise == "10.1.2.3"
        assert load("master", flags={"host": host, "insecure": True}).host == host
    refused("advertise", "without port", advertise="10.0.0.1:7400")


# --- files ----------------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    refused("nowhere.toml", "No such file", file=tmp_path / "nowhere.toml")
    refused(str(tmp_path), "directory", file=tmp_path)
    refused("kvpool.toml", "is empty", "[worker]", file=toml(tmp_path, ""))
    refused("kvpool.toml", "is empty", file=toml(tmp_path, "# only words\n"))
    refused("kvpool.toml", "no valid TOML", file=toml(tmp_path, "[worker\n"))
    refused("kvpool.toml", "no valid TOML", "line 3", file=toml(tmp_path, "[worker]\ndram = 5000\ndram = 6000\n"))
    refused("kvpool.toml", "no valid TOML", file=toml(tmp_path, "[worker]\ndram = null\n"))
    refused("kvpool.toml", "no valid TOML", file=toml(tmp_path, "[worker]\na = 1\n[worker]\nb = 1\n"))
    refused("kvpool.toml", "no valid TOML", file=toml(tmp_path, "a = " + "[" * 5000))
    refused("kvpool.toml", "larger than", file=toml(tmp_path, "#" * (1 << 20) + "\n"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\0")
    refused("binary.toml", "no valid TOML", file=binary)


def test_an_unreadable_file(tmp_path: Path) -> None:
    """Root may read anything: there a child without that right tries."""
    file = toml(tmp_path, "[worker]\n")
    file.chmod(0)
    assert stat.S_IMODE(file.stat().st_mode) == 0
    if os.geteuid():
        refused("kvpool.toml", "Permission denied", file=file)
        return
    tmp_path.chmod(0o755)
    program = (
        "import os, sys; from pathlib import Path; from kvpool.config import load\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: load('worker', file=Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("ConfigError config file") and "Permission denied" in done.stdout


def test_a_table_of_nothing_is_fine(tmp_path: Path) -> None:
    assert load("worker", file=toml(tmp_path, "[master]\nport = 1\n")).port == 0
    assert load("worker", file=toml(tmp_path, "[worker]\n")).port == 0


# --- this machine ---------------------------------------------------------------------------------------------------------


def test_more_memory_than_there_is() -> None:
    config.check_memory(GIB, memavailable=GIB, cgroup_limit=None)
    config.check_memory(GIB, memavailable=None, cgroup_limit=None)
    with pytest.raises(ConfigError, match=r"dram: .*MemAvailable.*1073741823"):
        config.check_memory(GIB, memavailable=GIB - 1, cgroup_limit=None)
    with pytest.raises(ConfigError, match=r"dram: .*cgroup.*1000000"):
        config.check_memory(GIB, memavailable=2 * GIB, cgroup_limit=1_000_000)


def test_more_disk_than_there_is() -> None:
    config.check_disk(GIB, total_bytes=GIB)
    with pytest.raises(ConfigError, match=r"ssd: 1073741824 .*1073741823"):
        config.check_disk(GIB, total_bytes=GIB - 1)


def test_all_roles_are_there() -> None:
    assert list(config.ROLES.values()) == [MasterSettings, WorkerSettings, ClientSettings, UpSettings]
    assert all(issubclass(cls, Settings) and cls.role is role for role, cls in config.ROLES.items())

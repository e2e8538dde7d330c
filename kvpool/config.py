"""Settings of every role: their names, units, defaults and ranges, and the one place that reads the environment for them.

    defaults  <  TOML file, table [<role>]  <  KVPOOL_<ROLE>__<FIELD>  <  flags

Nothing is ignored in silence: an unknown key, table or variable, and every bad value, is a ConfigError that names the key, where
it came from, what is allowed and the nearest right name. How sizes and times are written is in `quantities`; what /proc says
about this machine is read by the worker.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, overload

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvpool.errors import ConfigError
from kvpool.quantities import (
    GIB,
    KIB,
    MIB,
    TIB,
    SsdPlace,
    as_addresses,
    as_advertised,
    as_host,
    as_number,
    as_path,
    as_ssd,
    as_switch,
    as_text,
    as_whole,
    parse_size,
    parse_ssd,
    parse_time_ms,
    without_password,
)

log = logging.getLogger(__name__)

_warned: set[str] = set()  # variables that this process has warned of
HOUR_MS: Final = 3_600_000
MAX_CONFIG_FILE_BYTES: Final = 1 << 20


class Role(StrEnum):
    MASTER = "master"
    WORKER = "worker"
    CLIENT = "client"
    UP = "up"


def default_data_dir(role: Role) -> Path:
    """Where a role that was told nothing keeps its state: $XDG_STATE_HOME/kvpool/<role>, or ~/.local/state/kvpool/<role>."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(base) if base else Path.home() / ".local" / "state"
    except RuntimeError:  # no home: a container without a passwd entry
        root = Path.cwd() / "kvpool-data"
    return root / "kvpool" / role.value


Size = Annotated[int, BeforeValidator(parse_size)]
TimeMs = Annotated[int, BeforeValidator(parse_time_ms)]
Whole = Annotated[int, BeforeValidator(as_whole)]
Number = Annotated[float, BeforeValidator(as_number)]
Switch = Annotated[bool, BeforeValidator(as_switch)]
Text = Annotated[str, BeforeValidator(as_text)]
Advertised = Annotated[str, BeforeValidator(as_advertised)]
Host = Annotated[str, BeforeValidator(as_host)]
Addresses = Annotated[str, BeforeValidator(as_addresses)]
Ssd = Annotated[str, BeforeValidator(as_ssd)]
Directory = Annotated[Path, BeforeValidator(as_path)]


# --- settings of each role ----------------------------------------------------------------------------------------------


class Settings(BaseSettings):
    """Base of all settings: frozen, unknown names refused. Building one checks it and reads no environment; `load` does."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True)
    role: ClassVar[Role]
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        *_args: PydanticBaseSettingsSource,
        **_kwargs: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `load` merges, so that an error can name the source


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Served(Settings):
    """What all roles that listen have in common."""

    host: Host = Field("127.0.0.1", description="address to listen on; not loopback: token_file or insecure")
    advertise: Advertised = Field("", description="host that others are told; empty: host")
    http_host: Host = Field("127.0.0.1", description="address of /metrics, /healthz and /readyz")
    token_file: Text = Field("", description="file with the shared token; empty: no token is asked")
    insecure: Switch = Field(False, description="listen beyond loopback without a token")
    drain_timeout_ms: TimeMs = Field(10_000, ge=0, le=24 * HOUR_MS, description="how long a stop waits for work under way")

    @model_validator(mode="after")
    def _safe(self) -> Self:
        for name in ("host", "http_host"):
            host = getattr(self, name)
            if not _is_loopback(host) and not self.token_file and not self.insecure:
                raise ValueError(f"{name}: {host!r} is reachable from other machines; give token_file, or say insecure")
        return self

    @model_validator(mode="after")
    def _told(self) -> Self:
        if self.host in ("0.0.0.0", "::") and not self.advertise and self.role is not Role.MASTER:
            raise ValueError(f"advertise: host is {self.host}, which nobody can connect to; say by which address others do")
        return self


class MasterSettings(_Served):
    role: ClassVar[Role] = Role.MASTER
    port: Whole = Field(7400, ge=0, le=65535, description="gRPC port; 0: any free one")
    http_port: Whole = Field(7401, ge=0, le=65535, description="HTTP port; 0: any free one")
    data_dir: Directory = Field(default_factory=lambda: default_data_dir(Role.MASTER), description="directory of its state")
    store: Text = Field("", repr=False, description="empty: LMDB in data_dir; redis://...: shared by several masters")
    heartbeat_ms: TimeMs = Field(500, ge=10, le=60_000, description="how often workers say that they live")
    suspect_after_ms: TimeMs = Field(1500, ge=20, le=600_000, description="silence after which a worker is asked last")
    dead_after_ms: TimeMs = Field(4000, ge=30, le=HOUR_MS, description="silence after which a worker's blocks are lost")
    watch_coalesce_ms: TimeMs = Field(5, ge=0, le=10_000, description="how long index events are gathered for watchers")
    removal_log_max: Whole = Field(100_000, ge=1, le=10_000_000, description="removals remembered for workers that are away")
    gone_memory_keys: Whole = Field(200_000, ge=0, le=100_000_000, description="keys whose miss cause is remembered")
    rebuild_grace_ms: TimeMs = Field(3000, ge=0, le=600_000, description="how long a new master waits for known workers")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.heartbeat_ms < self.suspect_after_ms < self.dead_after_ms:
            raise ValueError(
                f"suspect_after_ms: must be heartbeat_ms < suspect_after_ms < dead_after_ms, not "
                f"{self.heartbeat_ms} < {self.suspect_after_ms} < {self.dead_after_ms}"
            )
        return self


class WorkerSettings(_Served):
    role: ClassVar[Role] = Role.WORKER
    master: Addresses = Field("127.0.0.1:7400", description="address of the master, several with commas")
    port: Whole = Field(0, ge=0, le=65535, description="data port; 0: any free one")
    http_port: Whole = Field(0, ge=0, le=65535, description="HTTP port; 0: any free one")
    data_dir: Directory = Field(default_factory=lambda: default_data_dir(Role.WORKER), description="directory of its state")
    dram: Size = Field(GIB, ge=4096, le=1024 * TIB, description="memory lent to the pool")
    ssd: Ssd = Field("", description="DIR:SIZE of the SSD tier; empty: none")
    buffered_ssd: Switch = Field(False, description="never use O_DIRECT for the SSD tier")
    io_threads: Whole = Field(4, ge=1, le=256, description="threads for SSD, long copies and hashing")
    ring_bytes: Size = Field(32 * MIB, ge=64 * KIB, le=GIB, description="ring of one local connection that puts")
    ring_total_bytes: Size = Field(GIB, ge=64 * KIB, le=64 * GIB, description="all rings together")
    connections_max: Whole = Field(4096, ge=1, le=100_000, description="connections served at once")
    idle_timeout_ms: TimeMs = Field(600_000, ge=100, le=24 * HOUR_MS, description="silence that closes a connection")
    body_timeout_ms: TimeMs = Field(30_000, ge=100, le=HOUR_MS, description="how long a begun frame may take")
    hold_ttl_ms_max: TimeMs = Field(600_000, ge=1, le=24 * HOUR_MS, description="longest hold")
    scrub_bytes_per_s: Size = Field(64 * MIB, ge=0, le=64 * GIB, description="re-read and checked of all tiers; 0: nothing")
    staging_bytes: Size = Field(256 * MIB, ge=MIB, le=64 * GIB, description="buffers for SSD reads and writes")
    high_watermark: Number = Field(0.9, gt=0, le=1, description="fill of the DRAM tier that starts making room")
    low_watermark: Number = Field(0.75, ge=0, lt=1, description="fill down to which blocks are kept ready to go")
    policy: Literal["hazard", "lru", "arc", "lru2", "s3fifo"] = Field(
        "hazard", description="what leaves next: hazard (learned from use), lru, arc, lru2 or s3fifo"
    )
    policy_clock: Text = Field("", description="file with the time that the policy goes by, of a replay; empty: the time")
    ssd_admission: Literal["index", "second_use"] = Field("index", description="what SSD takes: index (by worth), second_use")
    ssd_write_bytes_per_s: Size = Field(0, ge=0, le=64 * GIB, description="written to SSD at most; 0: no limit")
    ssd_write_bytes_per_day: Size = Field(0, ge=0, le=1024 * TIB, description="the same, a day; 0: no limit")
    copy_bytes_per_s: Size = Field(256 * MIB, ge=0, le=64 * GIB, description="copies for others, all together; 0: none")
    link_bytes_per_s: Size = Field(0, ge=0, le=1024 * GIB, description="what its network carries; 0: as the kernel says")

    @property
    def ssd_place(self) -> SsdPlace | None:
        """`ssd` as directory and bytes; None: no SSD tier."""
        return parse_ssd(self.ssd)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(f"low_watermark: {self.low_watermark} must be below high_watermark, {self.high_watermark}")
        if self.ring_bytes > self.ring_total_bytes:
            raise ValueError(f"ring_bytes: {self.ring_bytes} is above ring_total_bytes, {self.ring_total_bytes}")
        return self


class ClientSettings(Settings):
    role: ClassVar[Role] = Role.CLIENT
    master: Addresses = Field("127.0.0.1:7400", description="address of the master, several with commas")
    token: Text = Field("", repr=False, description="the shared token itself")
    token_file: Text = Field("", description="file with the shared token")
    transport: Literal["auto", "shm", "tcp", "nixl"] = Field("auto", description="auto, shm, tcp or nixl")
    verify: Literal["transit", "always"] = Field("transit", description="transit: what travelled; always: memory too")
    mirror: Switch = Field(True, description="keep a copy of the index")
    mirror_bytes_max: Size = Field(256 * MIB, ge=0, le=64 * GIB, description="memory of that copy; past it the master answers")
    lanes: Whole = Field(2, ge=1, le=16, description="connections used at once for one large transfer")
    copy_after: Whole = Field(3, ge=0, le=1000, description="reads of a block from other hosts until one here is made; 0: never")

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.token and self.token_file:
            raise ValueError("token: give token or token_file, not both")
        return self


class UpSettings(_Served):
    role: ClassVar[Role] = Role.UP
    workers: Whole = Field(1, ge=1, le=64, description="workers on this machine")
    dram: Size = Field(GIB, ge=4096, le=1024 * TIB, description="bytes of memory of each worker")
    ssd: Ssd = Field("", description="DIR:SIZE of each worker's SSD tier; empty: none")
    policy: Literal["", "hazard", "lru", "arc", "lru2", "s3fifo"] = Field(
        "", description="policy of the workers; empty: as they are set"
    )
    port: Whole = Field(7400, ge=0, le=65535, description="gRPC port of the master; 0: any free one")
    http_port: Whole = Field(7401, ge=0, le=65535, description="HTTP port of the master; 0: any free one")
    data_dir: Directory = Field(default_factory=lambda: default_data_dir(Role.UP), description="directory of all state")
    restarts_per_minute: Whole = Field(5, ge=0, le=60, description="how often a role that died is started again")

    @property
    def ssd_place(self) -> SsdPlace | None:
        """`ssd` as directory and bytes; None: no SSD tier."""
        return parse_ssd(self.ssd)


ROLES: Final[dict[Role, type[Settings]]] = {cls.role: cls for cls in (MasterSettings, WorkerSettings, ClientSettings, UpSettings)}


# --- where settings come from -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    value: Any
    source: str


# short forms that every command and library user knows; the long form of the same field goes before them
_SHORT_FORMS: Final[dict[str, dict[Role, str]]] = {
    "KVPOOL_MASTER": {Role.WORKER: "master", Role.CLIENT: "master"},
    "KVPOOL_TRANSPORT": {Role.CLIENT: "transport"},
}
# what Kubernetes puts into every pod beside a Service called kvpool-<role>: not ours, not a mistake either
_SERVICE_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")


@overload
def load(role: Literal["master"], *, file: Path | None = ..., flags: Mapping[str, Any] | None = ...) -> MasterSettings: ...
@overload
def load(role: Literal["worker"], *, file: Path | None = ..., flags: Mapping[str, Any] | None = ...) -> WorkerSettings: ...
@overload
def load(role: Literal["client"], *, file: Path | None = ..., flags: Mapping[str, Any] | None = ...) -> ClientSettings: ...
@overload
def load(role: Literal["up"], *, file: Path | None = ..., flags: Mapping[str, Any] | None = ...) -> UpSettings: ...
@overload
def load(role: str, *, file: Path | None = ..., flags: Mapping[str, Any] | None = ...) -> Settings: ...
def load(role: str, *, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """The checked settings of `role`. `flags`: field -> value, None: not given. Reads `file` and the environment.

    Raises ConfigError with one sentence for each wrong value. Two calls may differ; of a variable that may be another
    program's is warned once in a process. Any thread.
    """
    if role not in Role.__members__.values():
        raise ConfigError(f"role: {role!r} is none; roles are {', '.join(Role)}")
    role = Role(role)
    cls = ROLES[role]
    given: dict[str, _Given] = {}
    given.update(_from_file(role, file))
    given.update(_from_environment(role, os.environ))
    for name, value in (flags or {}).items():
        if name not in cls.model_fields:
            raise ConfigError(f"{name}: no setting of {role}{_near(name, cls.model_fields)}")
        if value is not None:
            given[name] = _Given(value, _flag(role, name))
    try:
        settings = cls(**{name: item.value for name, item in given.items()})
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(cls, given, error))) from None
    settings._sources.update({name: item.source for name, item in given.items()})
    return settings


def effective(settings: Settings) -> dict[str, Any]:
    """Every setting as it counts, as JSON-able values; tokens and passwords are not shown."""
    return {name: _shown(name, value) for name, value in settings.model_dump(mode="json").items()}


def _shown(name: str, value: Any) -> Any:
    """A value as others may see it."""
    if name == "token":
        return "***" if value else value
    return without_password(value if isinstance(value, str) else repr(value)) if name == "store" else value


def sources(settings: Settings) -> dict[str, str]:
    """Where each setting came from: "default", the file, the variable or the flag."""
    return {name: settings._sources.get(name, "default") for name in type(settings).model_fields}


def _flag(role: Role, name: str) -> str:
    if role is Role.CLIENT:  # a library has arguments
        return f"argument {name}"
    return "flag --" + name.removesuffix("_ms").replace("_", "-")


def _near(name: str, names: Any, *, shape: str = "{}") -> str:
    folded = {str(n).lower(): str(n) for n in names}
    near = difflib.get_close_matches(name.lower(), folded, 1, 0.5)
    return f"; did you mean {shape.format(folded[near[0]])}?" if near else f"; settings are {', '.join(sorted(map(str, names)))}"


def _from_file(role: Role, file: Path | None) -> dict[str, _Given]:
    """The role's table, after the names in all tables were checked."""
    if file is None:
        return {}
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"config file {file}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_CONFIG_FILE_BYTES:
        raise ConfigError(f"config file {file}: larger than {MAX_CONFIG_FILE_BYTES} bytes")
    try:
        tables = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config file {file}: no valid TOML: {error}") from None
    if not tables:
        raise ConfigError(f"config file {file}: is empty; it needs one of the tables {', '.join(f'[{r}]' for r in Role)}")
    for name, table in tables.items():
        _check_table(file, name, table)
    return {name: _Given(value, f"{file} [{role}]") for name, value in tables.get(role.value, {}).items()}


def _check_table(file: Path, name: str, table: object) -> None:
    if name not in Role.__members__.values():
        if isinstance(table, dict):
            raise ConfigError(f"config file {file}: unknown table [{name}]{_near(name, Role, shape='[{}]')}")
        owners = [role for role, cls in ROLES.items() if name in cls.model_fields]
        where = f"put it under {' or '.join(f'[{role}]' for role in owners)}" if owners else "settings stand in tables"
        raise ConfigError(f"config file {file}: {name} stands outside a table; {where}")
    if not isinstance(table, dict):
        raise ConfigError(f"config file {file}: {name} must be a table: write [{name}]")
    fields = ROLES[Role(name)].model_fields
    for key in table:
        if key not in fields:
            owners = [role for role, cls in ROLES.items() if key in cls.model_fields]
            hint = f"; it belongs in {' or '.join(f'[{role}]' for role in owners)}" if owners else _near(key, fields)
            raise ConfigError(f"config file {file}: {key} is no setting of [{name}]{hint}")


def _from_environment(role: Role, environ: Mapping[str, str]) -> dict[str, _Given]:
    """The role's variables, after the names of all of KVPOOL_... were checked."""
    names = {variable(r, field): (r, field) for r, cls in ROLES.items() for field in cls.model_fields}
    given: dict[str, _Given] = {}
    for short, fields in _SHORT_FORMS.items():
        if short in environ and role in fields:
            given[fields[role]] = _Given(environ[short], short)
    for name in sorted(environ):
        if name in names:
            owner, field = names[name]
            if owner is role:
                given[field] = _Given(environ[name], name)
        elif name not in _SHORT_FORMS and re.match(r"KV_?POOL_", name, re.IGNORECASE):
            _refuse_variable(name, environ[name], [*names, *_SHORT_FORMS])
    return given


def variable(role: Role, field: str) -> str:
    """The environment variable of a setting."""
    return f"KVPOOL_{role.upper()}__{field.upper()}"


def _refuse_variable(name: str, value: str, names: list[str]) -> None:
    """An error when somebody meant a setting; else (another program's, a Service link of Kubernetes) at most a warning."""
    if "__" not in name and (_SERVICE_LINK.search(name) or (name.endswith("_PORT") and "://" in value)):
        return
    near = difflib.get_close_matches(name.upper(), names, 1, 0.8)
    if not near and "__" not in name:
        if name not in _warned:
            _warned.add(name)
            log.warning("event=unknown_variable name=%s", name)
        return
    owner = next((role for role in Role if name.upper().startswith(f"KVPOOL_{role.upper()}__")), None)
    if owner is not None:  # a right role: the nearest of its own fields
        own = [n for n in names if n.startswith(f"KVPOOL_{owner.upper()}__")]
        near = difflib.get_close_matches(name.upper(), own, 1, 0.0)
    hint = f"; did you mean {near[0]}?" if near else f"; variables are KVPOOL_<ROLE>__<FIELD> with a role of {', '.join(Role)}"
    raise ConfigError(f"environment variable {name}: no setting has this name{hint}")


def _explain(cls: type[Settings], given: Mapping[str, _Given], error: ValidationError) -> Iterator[str]:
    """One sentence for each bad value: key, source, what is wrong, what is allowed."""
    for item in error.errors(include_url=False):
        message = item["msg"].removeprefix("Value error, ")
        if not item["loc"]:  # a check across fields: its message begins with the field
            used = [f"{name} from {given[name].source}" for name in given if re.search(rf"\b{name}\b", message)]
            yield message + (f" ({', '.join(used)})" if used else "")
            continue
        name = str(item["loc"][0])
        source = given[name].source if name in given else "default"
        shown = f"{_shown(name, item['input'])!r:.80}"
        said = _plain(message) if message.startswith(shown) else f"{shown}: {_plain(message)}"
        yield f"{name} (from {source}): {said}; allowed: {allowed(cls, name)}"


_WORDS: Final = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}


def _plain(message: str) -> str:
    return message.replace("Input should be greater than or equal to", "is below").replace(
        "Input should be less than or equal to", "is above").replace("Input should be", "must be")  # fmt: skip


def allowed(cls: type[Settings], name: str) -> str:
    """What a setting may be, in words."""
    field = cls.model_fields[name]
    limits = {attribute: getattr(rule, attribute) for rule in field.metadata for attribute in _WORDS if hasattr(rule, attribute)}
    words = [f"{_WORDS[attribute]} {limit}" for attribute, limit in limits.items()]
    return " ".join(words) or field.description or ""


# --- this machine -------------------------------------------------------------------------------------------------------


def check_memory(dram_bytes: int, *, memavailable: int | None, cgroup_limit: int | None) -> None:
    """Refuses a DRAM tier that this machine cannot hold. Bytes; None: not known. Raises ConfigError naming `dram`."""
    limits = ((memavailable, "available memory (MemAvailable)"), (cgroup_limit, "the memory limit of this container (cgroup)"))
    for limit, what in limits:
        if limit is not None and dram_bytes > limit:
            raise ConfigError(f"dram: {dram_bytes} bytes are more than {what}, {limit} bytes; allowed: from 4096 to {limit}")


def check_disk(ssd_bytes: int, *, total_bytes: int) -> None:
    """Refuses an SSD tier that its file system could not hold even when empty. What others put there later is met when it
    happens: a worker whose disk became full must still start."""
    if ssd_bytes > total_bytes:
        raise ConfigError(f"ssd: {ssd_bytes} bytes are more than its file system has; allowed: up to {total_bytes}")

"""What a device can do: memory, bandwidth, peak operations and its link to the next stage.

``profiles.json`` beside this file holds common devices as their vendors state them, each with its
source; a file of the same form describes any other::

    {"schema": "memkv-pp/device-profile/1", "name": "my-card", "memory_bytes": 25769803776,
     "bandwidth_bytes_per_s": 9.36e11, "half_flops_per_s": 7.1e13, "single_flops_per_s": 3.56e13,
     "link": "PCIe 4.0 x16", "link_bytes_per_s": 3.15e10, "source": "measured here, 2026-01-01"}
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import cast

from memkv_pp.errors import ConfigError

SCHEMA = "memkv-pp/device-profile/1"
TABLE_SCHEMA = "memkv-pp/device-profiles/1"
MOST_PROFILE_BYTES = 1 << 20

_KNOB = "--device-profile"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """One device. Rates are per second, dense (without sparsity), in one direction.

    ``memory_bytes`` is the size to plan with where ``--device`` names none. ``half_flops_per_s`` is
    the peak of bf16 or f16 matrix products, ``single_flops_per_s`` of f32 ones. ``link`` names what
    ``link_bytes_per_s`` is the rate of; ``link_latency_s`` is one hop's. ``source`` says where the
    figures come from.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    half_flops_per_s: float
    single_flops_per_s: float
    link: str
    link_bytes_per_s: float
    source: str
    link_latency_s: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_field(self.name, field.name, getattr(self, field.name))

    def peak(self, dtype_bytes: int) -> float:
        """Operations per second in a compute type of ``dtype_bytes``: f32's for 4, else half's."""
        return self.single_flops_per_s if dtype_bytes >= 4 else self.half_flops_per_s


@cache
def shipped_profiles() -> Mapping[str, DeviceProfile]:
    """The profiles that come with the package, by name."""
    text = (resources.files("memkv_pp.plan") / "profiles.json").read_text("utf-8")
    table = cast("Mapping[str, Sequence[Mapping[str, object]]]", json.loads(text))
    profiles = (_profile({"schema": SCHEMA, **row}, "profiles.json") for row in table["profiles"])
    return {profile.name: profile for profile in profiles}


def load_profile(text: str) -> DeviceProfile:
    """The profile of ``--device-profile NAME|FILE``; a name wins over a file of that name.

    Raises ConfigError naming the knob for a name nobody ships and a file that is no profile.
    """
    shipped = shipped_profiles()
    if text in shipped:
        return shipped[text]
    path = Path(text)
    try:
        if not path.is_file():
            raise ConfigError(
                f"{_KNOB}: {text[:80]!r} is no file and no shipped name",
                f"give a .json, or one of {', '.join(shipped)}",
            )
        if path.stat().st_size > MOST_PROFILE_BYTES:
            raise ConfigError(f"{_KNOB}: {text[:80]} is larger than {MOST_PROFILE_BYTES} bytes")
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{_KNOB}: {text[:80]!r} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{_KNOB}: {text[:80]} holds no JSON object")
    return _profile(cast("Mapping[str, object]", document), text[:80])


def stage_profiles(profiles: Sequence[DeviceProfile], num_stages: int) -> tuple[DeviceProfile, ...]:
    """One profile per stage: as given, or one given profile for every stage.

    Raises ConfigError naming the knob where the numbers do not agree.
    """
    if len(profiles) == 1:
        return (profiles[0],) * num_stages
    if len(profiles) != num_stages:
        raise ConfigError(
            f"{_KNOB}: {len(profiles)} profiles for {num_stages} stages",
            f"give {_KNOB} once, or once per stage",
        )
    return tuple(profiles)


def _profile(document: Mapping[str, object], where: str) -> DeviceProfile:
    if document.get("schema") != SCHEMA:
        raise ConfigError(
            f"{_KNOB}: {where}: schema is {str(document.get('schema'))[:80]!r}, not {SCHEMA!r}"
        )
    known = [field.name for field in fields(DeviceProfile)]
    unknown = sorted(set(document) - {"schema", *known})
    missing = [name for name in known if name not in document and name != "link_latency_s"]
    if unknown:
        raise ConfigError(
            f"{_KNOB}: {where}: {unknown[0][:80]!r} is unknown", f"known: {', '.join(known)}"
        )
    if missing:
        raise ConfigError(f"{_KNOB}: {where}: {missing[0]} is missing")
    values = {name: value for name, value in document.items() if name != "schema"}
    return DeviceProfile(**values)  # pyright: ignore[reportArgumentType]


def _check_field(profile: str, name: str, value: object) -> None:
    if name in ("name", "link", "source"):
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{_KNOB}: {name} of {str(profile)[:80]!r} must be text")
        return
    whole = name == "memory_bytes"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{_KNOB}: {name} of {str(profile)[:80]!r} must be {kind}")
    latency = name == "link_latency_s"
    if not math.isfinite(value) or value < 0 or (value == 0 and not latency):
        least = "finite and not negative" if latency else "finite and above 0"
        raise ConfigError(f"{_KNOB}: {name} of {str(profile)[:80]!r} is {value}, not {least}")

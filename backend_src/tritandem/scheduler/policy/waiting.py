"""What the rules may know of a waiting request. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ...contracts.requests import PriorityClass


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request. `number` is unique and grows with arrival."""

    number: int
    priority: PriorityClass
    tenant: str
    arrived_ns: int
    deadline_ns: int | None
    tokens: int  # expected prompt + output: what its tenant is charged
    head_start_ns: int = 0  # see `prefix`


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which rules hold and how strongly."""

    ageing_ns: int
    fair_share: bool = True
    quantum_tokens: int = 8192

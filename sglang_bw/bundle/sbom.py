"""The CycloneDX bill of materials of a bundle: every wheel with its hash; the engine's own SBOM lies in its wheel."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from sglang_bw.bundle.manifest import BundledWheel, Manifest

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "sglang-bw")

# The day of the build would make two equal bundles differ; the format wants a time.
_NO_DAY = datetime(1980, 1, 1, tzinfo=UTC)


def render(manifest: Manifest) -> str:
    """Return the SBOM as JSON text, equal for equal input."""
    whole = Component(
        name=manifest.name, version=manifest.engine, type=ComponentType.APPLICATION, bom_ref=f"bundle:{manifest.name}"
    )
    components = [_component(wheel) for wheel in manifest.wheels]
    serial = uuid.uuid5(_NAMESPACE, " ".join([manifest.name, *(wheel.sha256 for wheel in manifest.wheels)]))
    metadata = BomMetaData(component=whole, timestamp=_NO_DAY)
    bom = Bom(serial_number=serial, metadata=metadata, components=components)
    bom.register_dependency(whole, components)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _component(wheel: BundledWheel) -> Component:
    return Component(
        name=wheel.name,
        version=wheel.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{wheel.name}:{wheel.sha256}",
        purl=PackageURL("pypi", name=wheel.name, version=wheel.version, qualifiers={"file_name": wheel.file}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=wheel.sha256)],
    )

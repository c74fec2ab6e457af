"""The CycloneDX bill of materials of a built wheel (PEP 770): what was patched, by which patches.

CycloneDX has a word for exactly this, ``pedigree``: the ancestor is upstream's wheel, the patches say how the
component differs from it. Everything random in the format is derived from the tree id.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from cyclonedx.model import AttachedText, Encoding, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.model.issue import IssueClassification, IssueType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from sglang_bw.fork import mail
from sglang_bw.fork.record import BwRecord

SBOM_FILE = "sglang-bw.cdx.json"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "sglang-bw")

_CLASSES: dict[str, PatchClassification] = {
    mail.UpstreamStatus.BACKPORT: PatchClassification.BACKPORT,
    mail.UpstreamStatus.SUBMITTED: PatchClassification.CHERRY_PICK,
}


def render(record: BwRecord, patches: Sequence[mail.Patch], date: tuple[int, int, int, int, int, int]) -> str:
    """Return the SBOM as JSON text, equal for equal input.

    :param date: the upstream wheel's date; the SBOM carries it, not the day of the build.
    """
    ancestor = Component(
        name="sglang",
        version=record.base,
        type=ComponentType.LIBRARY,
        bom_ref=f"upstream:{record.upstream.sha256}",
        purl=PackageURL("pypi", name="sglang", version=record.base, qualifiers={"file_name": record.upstream.wheel}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=record.upstream.sha256)],
    )
    component = Component(
        name="sglang",
        version=record.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"sglang:{record.tree}",
        purl=PackageURL("pypi", name="sglang", version=record.version),
        licenses=[DisjunctiveLicense(id="Apache-2.0")],
        pedigree=Pedigree(
            ancestors=[ancestor],
            patches=[_patch(patch) for patch in patches],
            notes=_notes(record),
        ),
    )
    serial = uuid.uuid5(_NAMESPACE, f"{record.tree}:{record.upstream.sha256}:{record.version}")
    metadata = BomMetaData(component=component, timestamp=datetime(*date, tzinfo=UTC))
    return JsonV1Dot6(Bom(serial_number=serial, metadata=metadata)).output_as_string(indent=1) + "\n"


def _notes(record: BwRecord) -> str:
    notes = f"series {record.series}, tree {record.tree}"
    if record.local:
        notes += f"; local patches of the builder: {', '.join(patch.file for patch in record.local.patches)}"
    return notes


def _patch(patch: mail.Patch) -> Patch:
    kind = _CLASSES.get(patch.trailer("Upstream-Status").split(" ")[0], PatchClassification.UNOFFICIAL)
    text = AttachedText(
        content=base64.b64encode(patch.diff).decode(), encoding=Encoding.BASE_64, content_type="text/x-patch"
    )
    bugs = [bug for bug in patch.all("Bug") if bug.startswith("http")]
    return Patch(
        type=kind,
        diff=Diff(text=text),
        resolves=[
            IssueType(
                type=IssueClassification.DEFECT,
                id=patch.name,
                name=patch.subject,
                description=patch.trailer("Why"),
                references=[XsUri(bug) for bug in bugs],
            )
        ],
    )

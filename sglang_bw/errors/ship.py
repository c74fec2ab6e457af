"""Errors of bundles, keys, detached servers and files for other hosts."""

from __future__ import annotations

from sglang_bw.errors.base import BwError


class BundleError(BwError):
    """A bundle cannot be made as asked: nothing of that name to leave out, a package without a wheel, an odd model."""

    exit_code = 80


class BundleDamagedError(BwError):
    """A bundle is incomplete or damaged: a part or file is missing, too long, or not what its checksums say."""

    exit_code = 81


class BundleUnsafeError(BwError):
    """An archive has a member that an unpacker could be tricked with: a path that leads out, a link, a device."""

    exit_code = 82


class BundleDigestError(BwError):
    """A bundle is not the one that was expected."""

    exit_code = 83


class ApiKeyError(BwError):
    """The API key cannot be read, or is none."""

    exit_code = 90


class UnsafeLaunchError(BwError):
    """The launch would be open to everybody, or run code that anybody may change."""

    exit_code = 91


class UnknownServerError(BwError):
    """No server of that name was started here, or several begin like this."""

    exit_code = 92


class ServerStaysError(BwError):
    """A server did not end, although it was killed."""

    exit_code = 93


class EmitError(BwError):
    """The launch cannot be written as such a deployment file."""

    exit_code = 94

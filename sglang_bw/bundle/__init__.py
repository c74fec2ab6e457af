"""Bundles: everything a host without a registry needs to install and serve, in files that it can check."""

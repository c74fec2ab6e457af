"""What is known not to run, or to harm, on which machine: conditions as data, see ``known.yaml``."""

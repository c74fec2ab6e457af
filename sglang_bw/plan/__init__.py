"""What can be known of a launch before it happens: no GPU, no weights."""

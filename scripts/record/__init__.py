"""What gpu_record.py measures: the servers, the speed of two engines, and the bundled pair's tokens."""

"""Context parallelism: sequences sharded among processes."""

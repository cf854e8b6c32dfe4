"""Support for a machine without a scheduler."""

"""Support for PBS Professional and OpenPBS."""

"""Data of a training: preparing the file, and batches on their way to the device."""

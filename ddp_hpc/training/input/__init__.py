"""The input of a training: prepares the data file and loads batches from it to the device."""

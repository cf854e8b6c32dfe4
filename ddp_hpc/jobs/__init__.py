"""Jobs after their script is written: submit, status, logs and cancel. For login nodes, without torch."""

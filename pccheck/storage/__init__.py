"""Files and their names: the only rooms that touch the operating system's storage."""

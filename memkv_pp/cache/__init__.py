"""The bytes of a stage's cache: the device's seven operations, the arena, rows in and out."""

"""The configuration document: its schema, and how text becomes a checked, frozen `Config` with pointed errors.

Reading files, watching them and applying a new configuration is not here: that is I/O (`edge`, `app`).
"""

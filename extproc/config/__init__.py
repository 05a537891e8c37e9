"""The configuration document: its schema, and parsing of text into a checked, frozen `Config`.

Reading and watching files, and applying a new configuration, is not done here but in `edge` and `app`.
"""

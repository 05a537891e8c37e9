"""How operators see what the picker does: metrics, the log, remembered decisions, the metrics and admin pages.

Reads what others know and counts what they tell it; decides nothing.
"""

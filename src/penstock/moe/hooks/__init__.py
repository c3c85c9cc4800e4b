"""Hooks: functions of the rows at six places of the layer."""

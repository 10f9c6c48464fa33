"""One step as a value: a list of instructions for each pipeline rank, made by a pipeline schedule and passes.

``schedule.py`` orders microbatches through the stages, ``passes.py`` adds one concern each, ``check.py`` refuses
deadlocks and lost values, ``text.py`` writes a program and reads it back.
"""

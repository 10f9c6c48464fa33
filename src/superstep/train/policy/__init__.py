"""Policies of a step: spike detection, rollback, silent corruption, gradients computed again."""

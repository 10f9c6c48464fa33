"""Arguments of each verb that needs torch, read without it."""
